"""`import reshard`: what the functions return, against the safetensors library and the command."""

from __future__ import annotations

import json
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

import reshard
from tests.builders import EMBEDDING, HEAD, Tensor, files_in, llama_config, random_tensors, write_model
from tests.builders import reshard as command
from tests.fast.reshard.transforms.adapters import write_adapter
from tests.fast.runner.tiny import save_model
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained
from tools import api

NUMBER = Tensor(dtype="F32", shape=(1,), data=bytes(4))


@pytest.fixture
def model(tmp_path: Path) -> Path:
    write_model(tmp_path / "model", llama_config(tie_word_embeddings=True), num_shards=3)
    return tmp_path / "model"


def equal_bytes(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def test_functions_write_and_return_what_the_command_does(model: Path, tmp_path: Path) -> None:
    packed = reshard.pack(model, tmp_path / "api", "pp=2")
    told = command("pack", model, "--layout", "pp=2", "--out", tmp_path / "cli", "--json").json
    assert files_in(tmp_path / "api") == files_in(tmp_path / "cli")
    assert (packed.num_stages, packed.num_tensors, packed.nbytes) == (2, told["num_tensors"], told["nbytes"])
    verified, said = reshard.verify(tmp_path / "api"), command("verify", tmp_path / "cli", "--json").json
    assert (verified.equal, verified.num_tensors, verified.nbytes) == (True, said["num_tensors"], said["nbytes"])
    exported = reshard.export(tmp_path / "api", tmp_path / "again")
    assert exported.identical
    assert files_in(tmp_path / "again") == files_in(model)
    planned = reshard.plan(model, "pp=2")
    assert [list(stage.modules) for stage in planned.stages] == [
        stage["modules"] for stage in command("plan", model, "--layout", "pp=2", "--json").json["stages"]
    ]


def test_integers_of_numpy_and_paths_of_other_classes_are_taken(model: Path, tmp_path: Path) -> None:
    class Place:
        def __fspath__(self) -> str:
            return str(tmp_path / "out")

    nbytes: Any = np.int64(5_000_000_000)
    pp: Any = np.int64(2)
    halves = f"Et|t*{json.loads((model / 'config.json').read_text())['num_hidden_layers'] - 1},L"
    packed = reshard.pack(model, cast(Any, Place()), halves, pp=pp, max_shard_nbytes=nbytes)
    assert Path(packed.path) == tmp_path / "out" / "manifest.json"
    stages: Any = {np.int64(1)}
    assert reshard.verify(tmp_path / "out", stages=stages) == reshard.verify(tmp_path / "out", stages={1})
    opened = reshard.open(tmp_path / "out")
    assert opened.stage(pp - 1).info == opened.stage(1).info
    two = reshard.Assumptions(microbatch=2, recompute=2, seq_len=128)
    numpys = reshard.Assumptions(microbatch=pp, recompute=pp, seq_len=cast(Any, np.int16(128)))
    planned = reshard.plan(model, "pp=2", assumed=numpys)
    assert planned.forecast == reshard.plan(model, "pp=2", assumed=two).forecast
    assert type(planned.forecast.assumed.microbatch) is int
    assert reshard.layout("pp=2", layers=2 * pp, mtp=pp) == reshard.layout("pp=2", layers=4, mtp=2)


@pytest.mark.parametrize("value", [True, np.array([2, 3]), torch.tensor(2.0), "2", np.float64(2.0)], ids=repr)
def test_what_is_no_integer_is_refused(value: Any, model: Path) -> None:
    calls: tuple[Callable[[], object], ...] = (
        lambda: reshard.layout("pp=2", layers=value),
        lambda: reshard.plan(model, "1*2,2*2", pp=value),
        lambda: reshard.plan(model, "pp=2", assumed=reshard.Assumptions(microbatch=value)),
    )
    for call in calls:
        with pytest.raises(reshard.UsageError) as refused:
            call()
        assert refused.value.code == "options.invalid-value"


def test_one_name_or_folder_may_be_outside_a_list(tmp_path: Path) -> None:
    write_model(tmp_path / "model-with-more", llama_config(), {**random_tensors(llama_config()), "more.w": NUMBER})
    adapter = write_adapter(tmp_path / "adapter")
    for drop in ("more.w", ["more.w"], "more"):
        planned = reshard.plan(tmp_path / "model-with-more", "pp=2", drop=drop)
        assert planned.checkpoint.record.dropped == ("more.w",)
    for name, adapters in (("lone", str(adapter)), ("path", adapter), ("list", [str(adapter)])):
        conversion = reshard.Conversion(adapters=cast(Any, adapters))
        reshard.pack(tmp_path / "model-with-more", tmp_path / name, "pp=2", drop="more", conversion=conversion)
    assert files_in(tmp_path / "lone") == files_in(tmp_path / "path") == files_in(tmp_path / "list")


def test_counts_that_make_no_sense_are_refused_before_anything_is_written(model: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    calls: tuple[Callable[[], object], ...] = (
        lambda: reshard.pack(model, out, "pp=2", part=reshard.Part(number=3, of=2)),
        lambda: reshard.pack(model, out, "pp=2", part=reshard.Part(number=0, of=2)),
        lambda: reshard.pack(model, out, "pp=2", parallelism=reshard.Parallelism(num_threads=-1)),
        lambda: reshard.pack(model, out, "pp=2", parallelism=reshard.Parallelism(num_streams=cast(Any, "2"))),
        lambda: reshard.merge(model, [], out),
    )
    for call in calls:
        with pytest.raises(reshard.UsageError) as refused:
            call()
        assert refused.value.code == "options.invalid-value"
    assert not list(tmp_path.glob("*out*"))


def test_no_stage_to_verify_is_refused(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "out", "pp=2")
    stages: tuple[Any, ...] = ([], set(), iter(()), 1, [True])
    for some in stages:
        with pytest.raises(reshard.UsageError) as refused:
            reshard.verify(tmp_path / "out", stages=some)
        assert (refused.value.where, refused.value.code) == ("stages", "options.invalid-value")


def test_state_dict_has_the_bytes_that_safetensors_reads(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "out", "pp=2")
    source = {name: tensor for file in model.glob("*.safetensors") for name, tensor in load_file(file).items()}
    for stage in reshard.open(tmp_path / "out").stages:
        found = stage.state_dict(framework="torch")
        assert found.keys() == stage.tensors().keys()
        for fqn, tensor in found.items():
            assert equal_bytes(tensor, source[EMBEDDING if fqn == HEAD else fqn]), fqn
        for fqn, array in stage.state_dict(dtype="fp32").items():
            assert np.array_equal(array, found[fqn].float().numpy(), equal_nan=True), fqn
            assert array.flags.writeable


def test_bf16_as_numpy_is_refused_and_the_hint_works(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "out", "pp=2")
    stage = reshard.open(tmp_path / "out").stage(0)
    with pytest.raises(reshard.UsageError) as refused:
        stage.state_dict()
    assert refused.value.code == "options.array-dtype"
    assert 'dtype="fp32"' in refused.value.hint


@pytest.mark.parametrize("cut", ["rows", "both"])
def test_optimizer_state_and_slices_are_read_whole(tmp_path: Path, cut: str) -> None:
    whole = write_trained(tmp_path, "pp=2")
    expected = [
        {kind: stage.state_dict(kind, framework="torch") for kind in ("weights", "exp_avg", "exp_avg_sq")}
        for stage in reshard.open(whole).stages
    ]
    cut_up(whole, CUTS[cut])
    for before, stage in zip(expected, reshard.open(whole).stages, strict=True):
        for kind, tensors in before.items():
            found = stage.state_dict(kind, framework="torch")
            assert found.keys() == tensors.keys()
            assert all(equal_bytes(found[fqn], tensors[fqn]) for fqn in tensors)


def test_missing_optimizer_state_and_stages_are_refused(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "out", "pp=2")
    packed = reshard.open(tmp_path / "out")
    with pytest.raises(reshard.InputError) as refused:
        packed.stage(0).state_dict("exp_avg")
    assert refused.value.code == "checkpoint.no-optimizer-state"
    for index in (-1, 2, "0", 1.0, None):
        with pytest.raises(reshard.UsageError) as refused_stage:
            packed.stage(cast("int", index))
        assert refused_stage.value.code == "options.unknown-stage"


@pytest.mark.parametrize("place", [None, 3, ["pp2"]])
def test_what_is_no_path_is_refused(place: Any) -> None:
    for call in (reshard.open, reshard.verify):
        with pytest.raises(reshard.UsageError) as refused:
            call(place)
        assert refused.value.code == "options.invalid-value"


def test_progress_rises_to_the_total(model: Path, tmp_path: Path) -> None:
    calls: list[tuple[int, int]] = []

    def note(done: int, total: int) -> None:
        calls.append((done, total))

    def last() -> tuple[int, int]:
        assert calls == sorted(calls)
        assert calls[0][0] == 0
        found = calls[-1]
        calls.clear()
        return found

    reshard.pack(model, tmp_path / "out", "pp=2", progress=note)
    done, total = last()
    assert done == total > 0
    reshard.export(tmp_path / "out", tmp_path / "again", progress=note)
    done, total = last()
    assert done == total > 0
    reshard.verify(tmp_path / "out", progress=note)
    assert last()[0] > 0
    reshard.diff(model, tmp_path / "out", progress=note)
    assert last()[0] > 0


def test_parts_and_their_commit_are_the_pack(model: Path, tmp_path: Path) -> None:
    reshard.pack(model, tmp_path / "whole", "pp=2")
    with pytest.raises(reshard.OutputError) as refused:
        reshard.commit(tmp_path / "out")
    assert refused.value.code == "output.no-parts"
    first = reshard.pack(model, tmp_path / "out", "pp=2", part="1/2")
    assert (str(first.part), first.nbytes > 0, first.committed) == ("1/2", True, None)
    for call in (lambda: first.manifest, lambda: reshard.commit(tmp_path / "out")):
        with pytest.raises(reshard.OutputError) as refused:
            call()
        assert refused.value.code == "output.missing-parts"
    assert "`part='2/2'`" in refused.value.hint
    reshard.pack(model, tmp_path / "out", "pp=2", part="2/2")
    assert reshard.commit(tmp_path / "out").manifest == reshard.open(tmp_path / "whole").manifest
    for where, values in {"part": {"part": "3/2"}, "verify_source": {"part": "1/2", "verify_source": True}}.items():
        with pytest.raises(reshard.UsageError) as conflict:
            reshard.pack(model, tmp_path / "other", "pp=2", **values)
        assert conflict.value.where == where


def test_callback_sees_the_plan_and_may_stop_the_pack(model: Path, tmp_path: Path) -> None:
    class Stop(Exception):
        pass

    plans: list[Any] = []

    def stop(plan: Any) -> None:
        plans.append(plan)
        raise Stop

    with pytest.raises(Stop):
        reshard.pack(model, tmp_path / "out", "balance:params,pp=2", on_plan=stop)
    assert not (tmp_path / "out").exists()
    (plan,) = plans
    assert plan.traffic.write_nbytes > plan.nbytes > 0
    assert plan.assumed_step is not None


def test_layout_without_a_model_is_that_of_a_model(model: Path) -> None:
    assert reshard.layout("pp=2", layers=4).stages == reshard.plan(model, "pp=2").layout.stages
    with pytest.raises(reshard.UsageError) as refused:
        reshard.layout("pp=2", layers=0)
    assert refused.value.where == "layers"


def test_inspect_reads_manifests_and_other_formats(model: Path, tmp_path: Path) -> None:
    packed = reshard.pack(model, tmp_path / "out", "pp=2")
    contents = reshard.inspect(tmp_path / "out")
    assert isinstance(contents, reshard.PackedModel)
    assert contents.manifest == packed.manifest
    reshard.export(tmp_path / "out", tmp_path / "dcp", to="dcp")
    listing = reshard.inspect(tmp_path / "dcp")
    assert isinstance(listing, reshard.Listing)
    assert len(listing.tensors) == packed.num_tensors  # DCP has a tied weight under both names, a pack on both stages


ROOT = Path(__file__).parents[4]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("examples")
    save_model(folder / "model")
    return folder


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., str]:
    """Return what runs a script, and returns what it prints."""

    def run(script: str, *arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
        runpy.run_path(str(ROOT / "examples" / script), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_run_by_a_test_and_told_in_the_page() -> None:
    scripts = {path.name for path in (ROOT / "examples").glob("*.py")}
    started = (
        "data/test_own_losses.py",
        "save_stages_worker.py",
        "models/test_own_flags.py",
        "models/titan_worker.py",
        "proof/test_dumps.py",
    )
    tests = Path(__file__).read_text() + "".join(
        (ROOT / "tests" / "process" / "runner" / name).read_text() for name in started
    )
    page = api.render()
    for script in scripts:
        named = (
            f'"{script}"',
            f'examples/{script}"',
            f"from examples.{script.removesuffix('.py')} import",
            f"from {script.removesuffix('.py')} import",
        )
        assert any(name in tests for name in named), script
        assert f"examples/{script}" in page


def test_examples_pack_reshard_export_load_and_plot(folder: Path, run: Callable[..., str]) -> None:
    out = folder / "out"
    said = run("pack.py", folder / "model", out)
    assert "75 tensors are equal, 47 on another stage" in said
    assert files_in(out / "hf") == files_in(folder / "model")
    manifest = json.loads((out / "pp2" / "manifest.json").read_text())
    assert [f"({rank},): {stage['num_tensors']} tensors" in run("load_stage.py", out / "pp2", "--rank", str(rank))
            for rank, stage in enumerate(manifest["stages"])] == [True, True]  # fmt: skip
    said = run("inspect_and_plot.py", out / "pp2", folder / "stages.svg")
    assert all(f"stage {stage['index']}: {stage['num_tensors']} tensors" in said for stage in manifest["stages"])
    assert (folder / "stages.svg").read_text().startswith("<?xml")
