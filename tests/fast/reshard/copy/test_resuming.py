"""What was verified outlives a failure, and the same command resumes from it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from manifests.errors import InputError, UnreachableError
from reshard.copy.destination import open_target
from reshard.copy.engine import WriteOptions
from reshard.copy.journal import plan_key
from reshard.estimate.assumptions import Assumptions
from reshard.formats.huggingface.write import export
from reshard.formats.manifest.read import open_packed
from reshard.formats.open import open_source
from reshard.formats.saved_state import Place, Placed, SavedState
from reshard.formats.table import ExportOptions
from reshard.packing.plan import LayoutRequest, lay_out
from reshard.plans.pack_plan import lay_out_shard
from reshard.tensors.lazy import MemoryFile
from stores.bundles import TensorAt
from stores.hub import store as hub
from stores.net.retries import Retries
from stores.open import open_manifest
from tests.builders import Ended, files_in, leftovers, reshard, write_model
from tests.servers.hub import Hub, Request, serve_hub, set_up

SHARDS = 4  # of the model, and so the least number of runs of tensors that a pack verifies


@pytest.fixture
def served(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    write_model(tmp_path / "source", num_shards=SHARDS)
    with serve_hub() as served:
        set_up(monkeypatch, served, tmp_path / "cache")
        monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 5)
        monkeypatch.setattr(hub, "Retries", lambda: Retries(num_attempts=2, first_wait_s=0.001))
        served.push("org/tiny", files_in(tmp_path / "source"))
        yield served


def pack(out: Path, *more: str, source: str = "hf://org/tiny") -> Ended:
    return reshard("pack", source, "--layout", "pp=4", "--out", out, *more)


def take_data(served: Hub) -> list[Request]:
    return [request for request in served.take_requests() if request.is_cdn and request.method == "GET"]


@pytest.mark.parametrize("force", [(), ("--force",)], ids=["new", "force"])
def test_outage_keeps_what_was_verified_and_the_same_command_resumes(
    served: Hub, tmp_path: Path, force: tuple[str, ...]
) -> None:
    out, partial = tmp_path / "out", tmp_path / ".out.partial"
    one_by_one = ("--threads", "1", "--streams", "1")  # so that the outage comes at the same request each time
    if force:
        assert reshard("pack", tmp_path / "source", "--layout", "pp=2", "--out", out).code == 0
    old = files_in(out)
    take_data(served)
    assert pack(tmp_path / "whole", *one_by_one).code == 0
    whole = take_data(served)
    served.fail("/cdn/", after=len(whole) - 2, times=99, status=503)
    ended = pack(out, *force, *one_by_one, "--json")
    assert ended.code == 3
    assert ended.json["error"]["code"] == "store.busy"
    assert str(partial) in ended.json["error"]["hint"]
    assert files_in(out) == old
    served.faults.clear()
    take_data(served)
    assert pack(out, *force).code == 0
    assert sum(request.nbytes for request in take_data(served)) < sum(request.nbytes for request in whole)
    assert files_in(out) == files_in(tmp_path / "whole")
    assert not partial.exists()


def test_export_is_resumed_too(tmp_path: Path) -> None:
    source, packed, out = tmp_path / "source", tmp_path / "packed", tmp_path / "out"
    write_model(source, num_shards=SHARDS)
    assert reshard("pack", source, "--layout", "pp=4", "--out", packed).code == 0
    checkpoint = open_packed(open_manifest(packed))
    left = [0.6 * sum(tensor.nbytes for tensor in checkpoint.tensors.values())]  # more than two threads have begun

    def fail(nbytes: int) -> None:
        left[0] -= nbytes
        if left[0] < 0:
            raise UnreachableError("server", "is away", code="store.unreachable")

    with pytest.raises(UnreachableError) as refused:
        export(checkpoint, out, ExportOptions(to="hf", write=WriteOptions(progress=fail)))
    partial = tmp_path / ".out.partial"
    assert str(partial) in refused.value.hint
    inode = partial.stat().st_ino
    assert reshard("export", packed, "--to", "hf", "--out", out).code == 0
    assert files_in(out) == files_in(source)
    assert out.stat().st_ino == inode


@pytest.mark.parametrize("third", ["the same plan", "another plan"])
def test_auxiliary_file_that_a_resumed_run_added_is_not_of_others(third: str, tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=SHARDS)
    checkpoint = open_source(str(tmp_path / "source"))
    shards = lay_out("tiny", checkpoint, LayoutRequest(spec="pp=4"), Assumptions()).plan.shards_on()
    out = tmp_path / "out"

    def fail_after(name: str) -> None:
        with open_target(out, shards, force=False, wanted={name}) as target:
            target.write_shards(shards, WriteOptions())
            target.put(name, b"{}")
            raise UnreachableError("server", "is away", code="store.unreachable")

    for name in ("README.md", "vocab.json"):
        with pytest.raises(UnreachableError):
            fail_after(name)
    shards = shards if third == "the same plan" else shards[:1]
    with open_target(out, shards, force=False) as target:
        target.write_shards(shards, WriteOptions())
    assert set(files_in(out)) == {shard.path for shard in shards}


def test_source_that_is_cut_short_meanwhile_leaves_nothing_to_resume_from(tmp_path: Path) -> None:
    write_model(tmp_path / "source", num_shards=SHARDS)
    checkpoint = open_source(str(tmp_path / "source"))
    shards = lay_out("tiny", checkpoint, LayoutRequest(spec="pp=4"), Assumptions()).plan.shards_on()
    last = tmp_path / f"source/model-{SHARDS:05d}-of-{SHARDS:05d}.safetensors"

    def cut_short(nbytes: int) -> None:
        os.truncate(last, 100)

    with (
        pytest.raises(InputError) as refused,
        open_target(tmp_path / "out", shards, force=False) as target,
    ):
        target.write_shards(shards, WriteOptions(progress=cut_short))
    assert (refused.value.code, refused.value.where) == ("source.changed", str(last))
    assert leftovers(tmp_path / "out") == []


def test_the_key_of_a_plan_is_that_of_earlier_versions() -> None:
    """An interrupted pack is resumed by a later version, which must call the plan the same."""
    tensor = TensorAt("x", "U8", (4,), MemoryFile("source", bytes(4)), 0, 4)
    key = plan_key([lay_out_shard("a", [tensor]), lay_out_shard("b", [])])
    assert key == "40fa328e240892caa6a2dc093b4aee3a940c6b42b555010fcffe7f7923f91d12"


def test_plans_of_other_values_have_other_keys() -> None:
    """Those of as many bytes, too, such as other learning rates or step counts."""

    def key_of(step: int, value: object) -> str:
        state = SavedState()
        state.add_step(("optimizer.state.x.step",), step)
        state.add_value(("optimizer.param_groups.x.lr",), value)
        return plan_key(state.files.shards)

    assert len({key_of(7, 0.1), key_of(8, 0.1), key_of(7, 0.2)}) == 3
    assert key_of(7, 0.1) == key_of(7, 0.1)


def test_plans_of_other_chunks_have_other_keys() -> None:
    """Those of as many bytes, too, such as an expert by itself and in a stack, as torchtitan has it."""
    tensor = TensorAt("x", "BF16", (32, 16), MemoryFile("source", bytes(1024)), 0, 1024)

    def key_of(*shape: int) -> str:
        state, place = SavedState(), Place("x", (4, 32, 16)[-len(shape) :], ((0,) * len(shape),))
        state.add(Placed(tensor, shape, (place,)), lambda key: (key,))
        return plan_key(state.files.shards)

    assert key_of(32, 16) != key_of(1, 32, 16)
