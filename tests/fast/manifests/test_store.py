"""Files of a checkpoint folder, read with checks and written whole; errors keep what they carry."""

from __future__ import annotations

import errno
import os
import pickle
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from manifests.digest import digest_bytes
from manifests.errors import (
    InputError,
    RankError,
    SourceError,
    UnreachableError,
    UsageError,
    UserError,
    refused_by_system,
)
from manifests.safetensors import header_template, layout_tensors
from manifests.schema import Shard
from manifests.store import open_shard, read_small_file, write_file, write_manifest
from stores.open import open_manifest
from tests.fast.manifests.drawn_manifests import full_manifest
from tests.refusals import refusal, refused

ROOT = Path(__file__).parents[3]
ENTRIES = layout_tensors([("a", "F32", (2, 3))])
HEAD = header_template(ENTRIES, {})


def write_shard(folder: Path) -> Shard:
    (folder / "a.safetensors").write_bytes(HEAD + bytes(24))
    return Shard(path="a.safetensors", nbytes=len(HEAD) + 24, digest=digest_bytes(HEAD))


def test_manifest_that_breaks_an_invariant_is_not_written(tmp_path: Path) -> None:
    broken = replace(full_manifest(), stages=())
    assert refused(lambda: write_manifest(tmp_path, broken)) == ("manifest.inconsistent", "manifest.json")
    assert list(tmp_path.iterdir()) == []


def test_place_without_a_manifest_is_refused_with_what_is_there(tmp_path: Path, wording: Callable[[str], None]) -> None:
    for name in ("step-000009", "step-000010", "step-1000000"):
        (tmp_path / "run" / name).mkdir(parents=True)
        write_manifest(tmp_path / "run" / name, full_manifest())
    (tmp_path / "run" / "step-2000000").mkdir()  # unfinished
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    (tmp_path / "empty").mkdir()
    messages = []
    for place, code in (
        ("empty", "missing"),
        ("nothere", "no-such-folder"),
        ("nothere/manifest.json", "no-such-folder"),
        ("model", "not-packed"),
        ("run", "missing"),
    ):
        error = refusal(lambda: open_manifest(tmp_path / place).manifest)  # noqa: B023 - called at once
        assert (error.code, error.where) == (f"manifest.{code}", f"{tmp_path}/{place}")
        messages.append(str(error))
    assert f"{tmp_path}/run/step-1000000" in error.hint
    wording("\n".join(messages))


def test_shard_that_is_not_as_the_manifest_says_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    shard = write_shard(tmp_path)
    path = tmp_path / shard.path
    absent = refusal(lambda: open_shard(tmp_path, replace(shard, path="b.safetensors")))
    assert (absent.code, absent.where) == ("shard.missing", f"{tmp_path}/b.safetensors")
    path.write_bytes(HEAD.replace(b"00000", b"00001", 1) + bytes(24))
    spoiled = refusal(lambda: open_shard(tmp_path, shard))
    assert (spoiled.code, spoiled.where) == ("shard.digest-mismatch", str(path))
    os.truncate(path, 4100)
    short = refusal(lambda: open_shard(tmp_path, shard))
    assert (short.code, short.where) == ("shard.wrong-size", str(path))
    wording(f"{absent}\n{spoiled}\n{short}")


def test_small_file_is_checked(tmp_path: Path, wording: Callable[[str], None]) -> None:
    path = tmp_path / "config.json"
    absent = refusal(lambda: read_small_file(path))
    listed = refusal(lambda: read_small_file(path, digest_bytes(b"{}")))
    assert (absent.code, listed.code, absent.where) == ("store.no-such-file", "store.no-such-file", str(path))
    path.write_bytes(b"{}")
    assert read_small_file(path, digest_bytes(b"{}")) == b"{}"
    other = refusal(lambda: read_small_file(path, digest_bytes(b"[]")))
    assert (other.code, other.where) == ("source.digest-mismatch", str(path))
    os.truncate(path, (1 << 30) + 1)  # sparse
    large = refusal(lambda: read_small_file(path))
    assert (large.code, large.where) == ("source.file-too-large", str(path))
    wording(f"{absent}\n{listed}\n{other}\n{large}")


def test_write_that_fails_half_way_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(b"old")
    code = (
        "import resource, signal, sys; from pathlib import Path; from manifests.store import write_file\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN); resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "write_file(Path(sys.argv[1]), bytes(8192))"
    )
    ended = subprocess.run([sys.executable, "-c", code, path], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "OSError: [Errno 27] File too large" in ended.stderr
    assert path.read_bytes() == b"old"


def test_processes_of_two_containers_with_one_number_write_a_file_at_once(tmp_path: Path) -> None:
    path = tmp_path / "config.json"

    def first() -> Iterator[bytes]:
        yield b"first"
        write_file(path, b"second", is_durable=False)  # with this process's number, as in another container

    write_file(path, first(), is_durable=False)
    assert (path.read_bytes(), os.listdir(tmp_path)) == (b"first", ["config.json"])


def test_read_only_disk_has_a_hint_and_keeps_a_better_one() -> None:
    error = OSError(errno.EROFS, "Read-only file system", "out")
    bare, better = (
        refused_by_system("out", error, hint=hint, code="output.unwritable") for hint in ("", "use --log-dir")
    )
    assert bare.hint
    assert better.hint == "use --log-dir"


KINDS = (UserError, UsageError, InputError, SourceError, UnreachableError, RankError)


@pytest.mark.parametrize("kind", KINDS)
def test_error_seen_from_further_out_keeps_every_attribute_but_its_place(kind: type[UserError]) -> None:
    error = kind("a.json", "is empty", "download it again", code="source.empty")
    error.is_elsewhere, error.exit_code = True, 7
    seen = error.within("rank 2")
    assert (type(seen), seen.where) == (kind, "rank 2: a.json")
    assert {**vars(seen), "where": "a.json"} == vars(error)
    assert error.where == "a.json"


@pytest.mark.parametrize("kind", KINDS)
def test_error_sent_between_processes_arrives_as_it_was(kind: type[UserError]) -> None:
    error = kind("a.json", "is empty", "download it again", code="source.empty")
    error.is_elsewhere, error.exit_code = True, 7
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), vars(received)) == (kind, vars(error))
