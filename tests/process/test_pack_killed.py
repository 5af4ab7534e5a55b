"""Law 3: whenever pack is killed, what was there before still reads, and the next pack makes the whole."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from blake3 import blake3

from tests.builders import Tensor, llama_config, llama_shapes, reshard, write_model

pytestmark = pytest.mark.process

ROOT = Path(__file__).parents[2]
COMMAND = (sys.executable, "-c", "from reshard.cli import main; main()", "pack")
NUM_KILLS = 14
COMMIT_S = 0.02  # part of the time between the manifest and the end of the process
SIZES = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 5, "vocab_size": 16384}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a tied model of 54 MB in shards, no two tensors alike."""
    config, generator = llama_config(**SIZES, tie_word_embeddings=True), random.Random(0)
    tensors = {}
    for fqn, shape in llama_shapes(config).items():
        nbytes = 2 * shape[0] * (shape[1] if len(shape) > 1 else 1)
        tensors[fqn] = Tensor(dtype="BF16", shape=shape, data=generator.randbytes(nbytes))
    del tensors["lm_head.weight"]
    folder = tmp_path_factory.mktemp("killed") / "source"
    write_model(folder, config, tensors, num_shards=4)
    return folder


def start_pack(source: Path, out: Path, layout: str, *args: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [*COMMAND, source, "--layout", layout, "--out", out, *args], cwd=ROOT, stdout=subprocess.DEVNULL
    )


def pack_whole(source: Path, out: Path, layout: str, *args: str) -> dict[str, str]:
    """Pack without interruption, and give the digest of every file that was written."""
    assert start_pack(source, out, layout, *args).wait(60) == 0
    return digests_in(out)


def wait_for_bytes(pack: subprocess.Popen[bytes], out: Path, nbytes: int) -> None:
    """Wait until a pack has begun its folder and put so many bytes on disk, or has ended."""
    partial = out.with_name(f".{out.name}.partial")
    while pack.poll() is None and not partial.exists():
        time.sleep(0.0005)
    while pack.poll() is None and _written_nbytes(partial) < nbytes:
        time.sleep(0.0005)


def wait_for_work(pack: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until a pack has verified a run of tensors, or has ended: a line of its journal, after the first."""
    journal = out.with_name(f".{out.name}.partial") / ".journal"
    while pack.poll() is None and not (journal.exists() and journal.read_bytes().count(b"\n") >= 2):
        time.sleep(0.0005)


def wait_for_commit(pack: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until a pack has written its manifest and is about to publish its folder, or has ended."""
    while pack.poll() is None and not out.with_name(f".{out.name}.partial").joinpath("manifest.json").exists():
        time.sleep(0.0005)


def kill(pack: subprocess.Popen[bytes], out: Path, total_nbytes: int, generator: random.Random) -> bool:
    """Kill a pack while it writes or, as often, while it commits; say whether that came before its end."""
    if generator.random() < 0.5:
        wait_for_bytes(pack, out, generator.randrange(int(0.9 * total_nbytes)))
    else:
        wait_for_commit(pack, out)
        time.sleep(generator.uniform(0, COMMIT_S))
    pack.kill()
    return pack.wait(60) == -9


def digests_in(folder: Path) -> dict[str, str]:
    found = {}
    for path in folder.rglob("*"):
        if path.is_file():
            found[path.relative_to(folder).as_posix()] = blake3(path.read_bytes()).hexdigest()
    return found


def test_pack_killed_at_any_moment_leaves_nothing_readable_and_the_next_one_is_whole(source: Path) -> None:
    out, generator = source.with_name("out"), random.Random(1)
    partial, expected, num_killed = out.with_name(".out.partial"), pack_whole(source, out, "pp=4"), 0
    total_nbytes = _written_nbytes(out)
    for _ in range(NUM_KILLS):
        shutil.rmtree(out)
        num_killed += kill(start_pack(source, out, "pp=4"), out, total_nbytes, generator)
        for folder in (out, partial):
            if (folder / "manifest.json").exists():  # the kill came after the commit
                found = digests_in(folder)
                if folder == partial:  # which has its journal until it gets its name
                    found.pop(".journal", None)
                assert found == expected
        if out.exists():
            assert reshard("verify", out).code == 0
        else:
            assert reshard("verify", out).code == 3
            assert pack_whole(source, out, "pp=4") == expected
            assert not partial.exists()
    assert num_killed >= NUM_KILLS // 3


def test_forced_pack_killed_at_any_moment_leaves_the_old_checkpoint_or_the_new_one_whole(source: Path) -> None:
    out, generator, num_killed, layout = source.with_name("forced"), random.Random(2), 0, "pp=3"
    checkpoints = {asked: pack_whole(source, out, asked, "--force") for asked in ("pp=2", "pp=3")}
    total_nbytes = _written_nbytes(out)
    for _ in range(NUM_KILLS):
        asked = "pp=2" if layout == "pp=3" else "pp=3"
        killed = kill(start_pack(source, out, asked, "--force"), out, total_nbytes, generator)
        found = digests_in(out)
        layout = next(name for name, digests in checkpoints.items() if digests == found)
        assert killed or layout == asked
        assert reshard("verify", out).code == 0
        num_killed += killed
    assert num_killed >= NUM_KILLS // 3
    assert pack_whole(source, out, "pp=2", "--force") == checkpoints["pp=2"]
    assert [path.name for path in source.parent.iterdir() if "forced" in path.name] == ["forced"]


def test_pack_interrupted_from_the_keyboard_is_resumed(source: Path) -> None:
    out = source.with_name("interrupted")
    pack = start_pack(source, out, "pp=4")
    wait_for_work(pack, out)
    pack.send_signal(signal.SIGINT)
    assert pack.wait(60) == 130
    assert [path.name for path in source.parent.iterdir() if "interrupted" in path.name] == [".interrupted.partial"]
    assert start_pack(source, out, "pp=4").wait(60) == 0
    assert [path.name for path in source.parent.iterdir() if "interrupted" in path.name] == ["interrupted"]


def _written_nbytes(folder: Path) -> int:
    """Count what a folder's files take on disk; they are at their full length from the start."""
    nbytes = 0
    with contextlib.suppress(FileNotFoundError):  # it is being renamed or taken away
        for path in folder.rglob("*"):
            nbytes += 512 * path.stat().st_blocks
    return nbytes
