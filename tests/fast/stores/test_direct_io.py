"""Files that are written from front to back: parts of any size are joined to blocks."""

from __future__ import annotations

from pathlib import Path

import pytest

from stores.direct_io import SequentialFile


@pytest.mark.parametrize("block_nbytes", [999, 4096, 3 * 4096])
@pytest.mark.parametrize("sizes", [(4096, 4096, 8192), (5000, 1, 0, 30000, 4095), (7,)])
def test_appended_parts_follow_each_other_whatever_the_blocks_are(
    tmp_path: Path, block_nbytes: int, sizes: tuple[int, ...]
) -> None:
    parts = [bytes([number]) * size for number, size in enumerate(sizes, 1)]
    file = SequentialFile(tmp_path / "file", sum(sizes), block_nbytes)
    for part in parts:
        file.append(part)
    file.finish(b"head"[: sizes[0]])
    expected = b"".join(parts)
    assert (tmp_path / "file").read_bytes() == b"head" + expected[4:]
