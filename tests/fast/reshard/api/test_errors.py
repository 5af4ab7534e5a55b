"""Errors of `import reshard`: parameters where the command has flags, and command lines as they are typed."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from syrupy.assertion import SnapshotAssertion

import reshard
from manifests.module_times import ModuleTime
from tests.builders import llama_config, write_model

Call = Callable[[Path], object]
A, C = reshard.Assumptions, reshard.Conversion

CALLS: dict[tuple[str, str], tuple[Call, ...]] = {
    ("layout", "options.missing-layout"): (lambda at: reshard.plan(at / "model"),),
    ("pp", "options.needs-layout"): (
        lambda at: reshard.pack(at / "packed", at / "new", pp=2),
        lambda at: reshard.plan(at / "packed", pp=2),
    ),
    ("stages", "options.unknown-stage"): (
        lambda at: reshard.verify(at / "packed", stages=[2]),
        lambda at: reshard.verify(at / "packed", stages=[-1]),
    ),
    ("stages", "options.bad-stages"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", stages="x"),
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", stages=[0]),
    ),
    ("stages", "options.invalid-value"): (
        lambda at: reshard.verify(at / "packed", stages=3),
        lambda at: reshard.verify(at / "packed", stages="0"),
    ),
    ("progress", "options.invalid-value"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", progress=3),
        lambda at: reshard.verify(at / "packed", progress=3),
        lambda at: reshard.export(at / "packed", at / "new", progress=3),
    ),
    ("max_shard_nbytes", "options.invalid-value"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", max_shard_nbytes="1GB"),
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", max_shard_nbytes=0),
    ),
    ("out", "options.invalid-value"): (
        lambda at: reshard.pack(at / "model", None, "pp=2"),
        lambda at: reshard.export(at / "packed", 3),
        lambda at: reshard.merge(at / "model", [at / "packed"], b"new"),
        lambda at: reshard.commit(None),
    ),
    ("None", "source.not-a-folder"): (lambda at: reshard.inspect(None),),
    ("stages", "options.conflict"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", stages="0", virtual=True),
    ),
    ("virtual", "options.conflict"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", virtual=True, conversion=C(dtype="bf16")),
    ),
    ("quick", "options.conflict"): (lambda at: reshard.verify(at / "packed", quick=True, against=at / "model"),),
    ("reads_bytes", "options.conflict"): (lambda at: reshard.check(at / "model", reads_bytes=True),),
    ("model='AT/none.toml'", "model.no-file"): (lambda at: reshard.plan(at / "model", model=at / "none.toml"),),
    ("drop", "options.drop-from-manifest"): (lambda at: reshard.plan(at / "packed", drop=["model.norm"]),),
    ("drop", "options.unknown-drop"): (lambda at: reshard.plan(at / "model/config.json", "pp=2", drop=["x"]),),
    ("out", "output.overlaps-source"): (lambda at: reshard.export(at / "packed", at / "packed/inside"),),
    ("AT/packed", "output.exists"): (lambda at: reshard.pack(at / "model", at / "packed", "pp=2"),),
    ("AT/packed", "output.overlaps-source"): (lambda at: reshard.export(at / "packed", at / "packed", force=True),),
    ("names", "options.conflict"): (lambda at: reshard.export(at / "packed", at / "new", names="torchtitan"),),
    ("tied_key", "options.conflict"): (lambda at: reshard.export(at / "packed", at / "new", tied_key="wte"),),
    ("weights_only", "options.conflict"): (lambda at: reshard.export(at / "packed", at / "new", weights_only=True),),
    ("dtype", "options.conflict"): (
        lambda at: reshard.export(at / "packed", at / "new", to="universal", dtype="bf16"),
    ),
    ("assumed.memory_limit", "options.conflict"): (
        lambda at: reshard.plan(at / "model", "balance:params,pp=2,limit=1GB", assumed=A(memory_limit=1)),
    ),
    ("assumed.loss_chunk", "options.tp-loss-chunk"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(tensor=2, loss_chunk=5)),
    ),
    ("assumed.schedule", "schedule.unknown"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(schedule="none")),
    ),
    ("assumed.schedule", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(schedule=at / "table.csv")),
    ),
    ("assumed.optimizer", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(optimizer=at / "groups.toml")),
    ),
    ("assumed.ema", "options.invalid-value"): (lambda at: reshard.plan(at / "model", "pp=2", assumed=A(ema=1.5)),),
    ("pp", "options.invalid-value"): (lambda at: reshard.layout("Et|tL", layers=2, pp="2"),),
    ("assumed.overhead", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(overhead=3)),
    ),
    ("assumed", "options.invalid-value"): (lambda at: reshard.plan(at / "model", "pp=2", assumed={"seq_len": 128}),),
    ("mtp", "options.invalid-value"): (
        lambda at: reshard.layout("pp=2", layers=4, mtp=-1),
        lambda at: reshard.layout("pp=2", layers=4, mtp="1"),
    ),
    ("layout", "options.invalid-value"): (
        lambda at: reshard.pack(at / "model", at / "new", 2),
        lambda at: reshard.plan(at / "model", 2),
        lambda at: reshard.layout(2, layers=4),
    ),
    ("framework", "options.invalid-value"): (
        lambda at: reshard.open(at / "packed").stage(0).state_dict(framework="jax"),
    ),
    ("dtype", "options.invalid-value"): (
        lambda at: reshard.open(at / "packed").stage(0).state_dict(dtype="bfloat16"),
        lambda at: reshard.export(at / "packed", at / "new", dtype="bfloat16"),
    ),
    ("kind", "options.invalid-value"): (lambda at: reshard.open(at / "packed").stage(0).tensors("moments"),),
    ("layers", "options.invalid-value"): (lambda at: reshard.layout("pp=2", layers=10**8),),
    ("measured", "options.conflict"): (
        lambda at: reshard.layout("pp=2", layers=4, measured={"lm_head": ModuleTime(forward=1.0, backward=2.0)}),
    ),
    ("to", "options.invalid-value"): (lambda at: reshard.export(at / "packed", at / "new", to="nemo"),),
    ("names", "options.invalid-value"): (lambda at: reshard.export(at / "packed", at / "new", names="nemo"),),
    ("io", "options.invalid-value"): (
        lambda at: reshard.export(at / "packed", at / "new", io="mmap"),
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", io="mmap"),
    ),
    ("conversion.dtype", "options.invalid-value"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", conversion=C(dtype="fp8")),
    ),
    ("assumed.dtype", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(dtype="fp8")),
    ),
    ("assumed.recompute", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(recompute="some")),
    ),
    ("assumed.seq_len", "options.invalid-value"): (
        lambda at: reshard.plan(at / "model", "pp=2", assumed=A(seq_len=0)),
    ),
    ("layout", "layout.unknown-cost"): (lambda at: reshard.plan(at / "model", "balance:none,pp=2"),),
    ("conversion.dequantize", "options.not-quantized"): (
        lambda at: reshard.pack(at / "model", at / "new", "pp=2", conversion=C(dequantize="bf16")),
    ),
    ("AT/model", "manifest.not-packed"): (
        lambda at: reshard.verify(at / "model"),
        lambda at: reshard.export(at / "model", at / "new"),
    ),
    ("AT/virtual/manifest.json", "manifest.unrooted-bytes"): (
        lambda at: reshard.push(at / "virtual", "org/name"),
        lambda at: reshard.sign(at / "virtual", key=at / "key.pem"),
    ),
    ("s3://bucket/packed", "store.unsupported"): (lambda at: reshard.push("s3://bucket/packed", "org/name"),),
    ("revision", "options.conflict"): (lambda at: reshard.push(at / "packed", "org/name@a", revision="b"),),
    ("digests", "options.invalid-value"): (lambda at: reshard.check(at / "model", digests="bogus"),),  # type: ignore[arg-type]
    ("AT/model/digests.json", "source.no-digests"): (lambda at: reshard.check(at / "model", digests="verify"),),
    ("quantize", "options.invalid-value"): (lambda at: reshard.export(at / "packed", at / "new", quantize="fp8"),),  # type: ignore[arg-type]
}
ROWS = [(*row, call) for row, calls in CALLS.items() for call in calls]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("errors")
    write_model(folder / "model", llama_config())
    reshard.pack(folder / "model", folder / "packed", "pp=2")
    reshard.pack(folder / "model", folder / "virtual", "pp=2", virtual=True)
    return folder


@pytest.mark.parametrize(("where", "code", "call"), ROWS)
def test_errors_name_parameters_or_a_command_line(
    where: str, code: str, call: Call, at: Path, snapshot: SnapshotAssertion
) -> None:
    with pytest.raises(reshard.UserError) as refused:
        call(at)
    error = refused.value
    assert (error.where.replace(str(at), "AT"), error.code) == (where, code)
    text = f"{error.problem}\n{error.hint}"
    no_command = re.sub(r"\breshard [a-z]+ [^;\n]*", "", text)
    assert "--" not in no_command
    assert all("`" not in line for line in re.findall(r"\breshard [a-z]+ --[^;\n]*", text))
    for name in re.findall(r"`([a-z_]+)[^`]*`", text):
        assert name in PARAMETERS
    assert str(error).replace(str(at), "AT") == snapshot


PARAMETERS = {
    name
    for function in (reshard.PackedStage.state_dict, *(getattr(reshard, name) for name in reshard.__all__))
    if inspect.isfunction(function)
    for name in inspect.signature(function).parameters
}


def test_code_below_the_commands_names_parameters_of_the_api() -> None:
    root = Path(reshard.__file__).parents[1]
    names, flags = set[str](), set[str]()
    for path in (path for package in ("manifests", "reshard", "stores") for path in (root / package).rglob("*.py")):
        if path.is_relative_to(root / "reshard/cli") or path in {root / rules for rules in OF_TRAINING}:
            continue
        text = path.read_text()
        names |= set(re.findall(r"""\bParameter\(["']([a-z_.]+)["']""", text))
        flags |= set(re.findall(r"""Error\(\s*f?"(--[a-z-]+)""", text))
    fields = {f"{parameter}.{name}" for parameter, kind in OBJECTS.items() for name in kind.__dataclass_fields__}
    assert names - fields <= PARAMETERS
    assert {name for name in names if "." in name} <= fields
    assert flags == ONLY_FLAGS


# Rules of training's flags, which `runner launch` refuses by, and the search for layouts keeps.
OF_TRAINING = (
    "manifests/models/combinations.py",
    "manifests/models/trainable.py",
    "manifests/optimizer_groups.py",
)
OBJECTS = {"assumed": A, "conversion": C}
# Of what no function of the API does: --ac and rates are text in commands alone, and layouts are drawn and written
# by commands.
ONLY_FLAGS = {"--ac", "--draw", "--efficiency", "--hardware", "--write", "--image", "--mount", "--sbatch-arg"}
