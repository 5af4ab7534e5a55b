"""A rank reads its weights while the self-check runs, and no longer if that fails; what it starts from instead."""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from manifests.errors import InputError, ModelError, OutputError, UsageError
from manifests.schema import WEIGHTS, TrainingState
from runner import setup
from runner.bundle.packed import open_packed
from runner.checkpoint.history import checkpoint_path, find_checkpoints
from runner.checkpoint.resume import Origin
from runner.checkpoint.save import save
from runner.checkpoint.state import nbytes_of
from runner.config.flags import parse_training
from runner.distributed.world import World
from runner.load import stored
from runner.load.load import Reading, plan_reads, read_all, read_planned
from runner.pipeline import losses
from runner.proof.combination import Combination
from runner.rundir.exit_report import code_of
from runner.setup import Ready, begin
from runner.tensors.local_shard import whole_pieces
from runner.train import check_writes
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.reshard.forged import change_manifest
from tests.fast.runner.tiny import save_model
from tests.fast.trained import write_trained

pytestmark = pytest.mark.usefixtures("one_rank")

LIMIT_S = 60
GROUPS = '[[group]]\nalgorithm = "muon"\npatterns = ["*.experts.0.*"]\n[[group]]\nalgorithm = "adamw"'


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    save_model(tmp_path / "model", num_hidden_layers=1)
    return pack(tmp_path / "model", tmp_path / "packed", "pp=1")


def start(packed: Path, *origins: Path, flags: tuple[str, ...] = (), data: str = "synthetic") -> Ready:
    options = parse_training(["--data", data, "--log-dir", str(packed.parent / "log"), *flags])
    found, world = tuple(map(Origin, origins or (packed,))), World(rank=0, local_rank=0, size=1)
    return begin(open_packed(open_manifest(packed)), found, options, world, torch.device("cpu"))


def test_weights_are_read_while_the_self_check_runs(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_read = threading.Event()

    def read(*args: Any) -> Any:
        result = read_planned(*args)
        has_read.set()
        return result

    def check(*args: Any, **kwargs: Any) -> None:
        assert has_read.wait(LIMIT_S)

    monkeypatch.setattr(stored, "read_planned", read)
    monkeypatch.setattr(setup, "prove_once", check)
    ready = start(packed)
    assert ready.loaded.nbytes == sum(parameter.nbytes for parameter in ready.chunks[0].parameters())


def test_self_check_that_fails_ends_the_reading(packed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()

    def read(*args: Any) -> Any:
        if args[-1].stop.wait(LIMIT_S):
            ended.set()

    def check(*args: Any, **kwargs: Any) -> None:
        raise ModelError("config.json", "differs", code="model.self-check-failed")

    monkeypatch.setattr(stored, "read_planned", read)
    monkeypatch.setattr(setup, "prove_once", check)
    with pytest.raises(ModelError):
        start(packed)
    assert ended.wait(LIMIT_S)


@pytest.mark.parametrize(
    ("optimizer", "is_kept"), [("adamw", True), ("torch.optim.SGD", True), ("own_optimizer.Mine", False)]
)
def test_proof_is_kept_only_with_optimizers_that_are_torchs(
    optimizer: str, is_kept: bool, packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_optimizer.py").write_text("import torch\nclass Mine(torch.optim.SGD): pass\n")
    monkeypatch.syspath_prepend(tmp_path)
    checks = list[dict[str, bool]]()
    monkeypatch.setattr(setup, "prove_once", lambda *args, **kwargs: checks.append(kwargs))
    start(packed, flags=("--optimizer", optimizer))
    assert checks == [{"is_kept": is_kept}]


@pytest.mark.parametrize(("flags", "is_compared"), [((), True), (("--no-self-check",), False)])
def test_documents_are_always_checked_and_a_loss_of_another_package_is_not(
    flags: tuple[str, ...], is_compared: bool, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = list[Combination]()
    monkeypatch.setattr(losses, "load_entry_point", lambda *names: lambda logits, labels: (logits.sum(), 1))
    monkeypatch.setattr(setup, "prove_once", lambda run, *args, **kwargs: runs.append(run))
    start(packed, flags=("--document-mask", "--loss", "own", *flags), data="text.jsonl")
    assert [(run.has_documents, run.loss is not None) for run in runs] == [(True, is_compared)]


def test_reading_that_is_stopped_reads_nothing_more(packed: Path) -> None:
    opened = open_packed(open_manifest(packed))
    empty = {fqn: torch.zeros(shape) for fqn, shape in opened.shape.tensors.items()}
    stop = threading.Event()
    stop.set()
    read_all(plan_reads(whole_pieces(empty), opened.bundles, opened.shape), Reading(stop=stop))
    assert not any(tensor.any() for tensor in empty.values())


def test_rank_with_a_weight_that_is_in_two_parameter_groups_is_named(packed: Path) -> None:
    folder = packed.parent
    save_tiny(folder / "moe", "Qwen3MoeForCausalLM")
    (folder / "groups.toml").write_text(GROUPS)
    flags = ("--no-self-check", "--optimizer", str(folder / "groups.toml"))
    with pytest.raises(UsageError) as error:
        start(pack(folder / "moe", folder / "experts", "pp=1"), flags=flags)
    assert error.value.code == "options.optimizer-pattern"
    assert error.value.where.startswith("rank 0: --optimizer: ")


def test_node_without_room_for_the_newest_checkpoint_does_not_start_from_an_older_one(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1")
    flags = ("--stage-to-local", str(packed.with_name("cache")), "--no-self-check")
    start(packed, flags=flags)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(total=1, free=0))
    with pytest.raises(OutputError) as error:
        start(packed, newest, packed, flags=flags)
    assert error.value.code == "output.disk-full"


def test_checkpoint_that_this_user_may_not_read_is_not_passed_over_for_an_older_one(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, opened = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1"), os.open

    def refused(path: Any, *args: Any, **named: Any) -> int:
        if str(path).startswith(f"{newest}/"):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
        return opened(path, *args, **named)

    monkeypatch.setattr(os, "open", refused)
    with pytest.raises(InputError, match="Permission denied") as error:
        start(packed, newest, packed, flags=("--no-self-check",))
    assert (error.value.code, error.value.where) == ("store.unreadable", f"rank 0: {newest}/manifest.json")


def test_run_that_resumes_needs_no_room_for_frozen_weights_which_its_checkpoints_share(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint whose shards have frozen and trained weights shares none of them, nor does a disk without links."""
    history, world = packed.with_name("history"), World(rank=0, local_rank=0, size=1)
    ready = start(packed, flags=("--no-self-check", "--checkpoint", str(history), "--train-only", "lm_head"))
    (weights,) = (kinds[WEIGHTS] for kinds in ready.held_weights().values())
    frozen_nbytes = sum(piece.memory.nbytes for piece in weights if piece.fqn != "lm_head.weight")
    of_run, other = checkpoint_path(history, 1), checkpoint_path(history, 2)
    save(ready.held_weights(), ready.save_context, of_run, TrainingState(step=1, num_tokens=1))
    pack(packed.with_name("model"), other, "pp=1")
    resumed, repacked = (replace(ready, origin=open_packed(open_manifest(path))) for path in (of_run, other))
    free_nbytes = nbytes_of(ready.held_state()) - frozen_nbytes
    monkeypatch.setattr(os, "statvfs", lambda _: SimpleNamespace(f_blocks=1, f_frsize=1, f_bavail=free_nbytes))
    check_writes(resumed, world, {})
    whole = replace(resumed, save_context=replace(ready.save_context, trained=None))
    for changed in (ready, repacked, whole):
        with pytest.raises(InputError) as error:
            check_writes(changed, world, {})
        assert error.value.code == "output.disk-full"
    monkeypatch.setattr(os, "link", lambda *_: os.stat("/nowhere"))
    with pytest.raises(InputError) as error:
        check_writes(resumed, world, {})
    assert error.value.code == "output.disk-full"
    assert not list(history.glob(".probe-*"))


def test_what_a_killed_run_has_not_pruned_is_pruned_before_the_room_for_another_checkpoint_is_checked(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history, trained = packed.with_name("history"), write_trained(packed.parent, "pp=1", num_hidden_layers=1)
    for step in (1, 2, 3):
        path = Path(shutil.copytree(trained, checkpoint_path(history, step)))
        change_manifest(path, lambda document, step=step: document["training"].update(step=step))
    oldest, newest = checkpoint_path(history, 1), open_packed(open_manifest(checkpoint_path(history, 3)))
    ready = start(packed, flags=("--no-self-check", "--checkpoint", str(history), "--keep", "2", "--resume", "auto"))
    resumed = replace(ready, origin=newest, training=TrainingState(step=3, num_tokens=1))
    later, world = replace(resumed.options, digests="background"), World(rank=0, local_rank=0, size=1)

    def statvfs(path: Any) -> SimpleNamespace:
        return SimpleNamespace(f_blocks=1, f_frsize=1, f_bavail=0 if oldest.exists() else 1 << 40)

    monkeypatch.setattr(os, "statvfs", statvfs)
    for unverified in (ready, replace(resumed, options=later)):
        with pytest.raises(InputError) as error:
            check_writes(unverified, world, {})
        assert error.value.code == "output.disk-full"
    check_writes(resumed, world, {})
    renamed = Path(shutil.copytree(trained, history / "best"))
    check_writes(replace(resumed, origin=open_packed(open_manifest(renamed))), world, {})
    assert find_checkpoints(history) == (checkpoint_path(history, 3), checkpoint_path(history, 2))


@pytest.mark.parametrize(("number", "code"), [(errno.EIO, 5), (errno.EACCES, 3)])
def test_schedule_file_that_cannot_be_read_is_no_reason_to_start_from_an_older_checkpoint(
    number: int, code: int, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1")
    table, read_text, attempts = packed.with_name("table.csv"), Path.read_text, list[Path]()

    def refused(path: Path, *args: Any, **named: Any) -> str:
        if path == table:
            attempts.append(path)
            raise OSError(number, os.strerror(number), str(path))
        return read_text(path, *args, **named)

    monkeypatch.setattr(Path, "read_text", refused)
    with pytest.raises(InputError) as error:
        start(packed, newest, packed, flags=("--no-self-check", "--schedule", str(table)))
    assert (error.value.code, code_of(error.value), len(attempts)) == ("schedule.unreadable", code, 1)


def test_checkpoint_with_a_file_that_all_ranks_see_a_moment_later_is_read_again(
    packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1")
    (shard,) = newest.rglob("*.safetensors")
    hidden = shard.rename(packed.with_name("hidden"))
    monkeypatch.setattr(setup, "see_all", lambda folder: folder == newest and bool(hidden.rename(shard)))
    assert start(packed, newest, packed, flags=("--no-self-check",)).origin.root == newest


@pytest.mark.parametrize("code", ["manifest.differs-between-ranks", "shard.readings-differ"])
def test_node_with_an_outdated_copy_or_a_faulty_disk_does_not_start_from_an_older_checkpoint(
    code: str, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1")

    def check(where: str, digest: str) -> None:
        if where.startswith(str(newest)):
            raise InputError(where, "differs", code=code)

    monkeypatch.setattr(setup, "check_same_manifest", check)
    with pytest.raises(InputError) as error:
        start(packed, newest, packed, flags=("--no-self-check",))
    assert error.value.code == code


@pytest.mark.parametrize(
    "change",
    [lambda path: os.chmod(path, 0o640), lambda path: os.truncate(path, 4096)],  # as `cp` does to what it replaces
    ids=["chmod", "truncate"],
)
def test_checkpoint_that_somebody_changes_meanwhile_is_read_by_the_next_attempt(
    change: Callable[[str], None], packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    newest, preadv = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1"), os.preadv

    def preadv_and_change(descriptor: int, *args: Any) -> int:
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        if path.startswith(f"{newest}/") and path.endswith(".safetensors"):
            time.sleep(0.02)  # the kernel's clock has ticked
            change(path)
        return preadv(descriptor, *args)

    monkeypatch.setattr(os, "preadv", preadv_and_change)
    with pytest.raises(InputError) as error:
        start(packed, newest, packed, flags=("--no-self-check",))
    assert (error.value.code, code_of(error.value)) == ("source.changed", 5)


def test_checkpoint_of_a_later_version_is_not_passed_over_for_an_older_one(packed: Path) -> None:
    newest = pack(packed.with_name("model"), packed.with_name("newest"), "pp=1")
    document = json.loads((newest / "manifest.json").read_text())
    (newest / "manifest.json").write_text(json.dumps({**document, "version": 99}))
    with pytest.raises(InputError) as error:
        start(packed, newest, packed, flags=("--no-self-check",))
    assert (error.value.code, code_of(error.value)) == ("manifest.unsupported-version", 3)
