"""The page on the Python API, from signatures and docstrings, for `tools/site.py`."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).parents[1]
PACKAGES = ("reshard", "runner")

# Attributes of public classes that only the packages use: they lead to types that are not public.
_INTERNAL = {
    "Assumptions": {"num_per_stage", "schedule_for", "microbatches_for"},
    "Forecast": {"timeline"},
    "PackResult": {"used"},
    "PackedModel": {"bundles"},
    "Parallelism": {
        "used",
        "most_threads",
        "threads_for",
        "within",
        "uploads_of",
        "uploads_of_kept",
        "prefetcher",
        "add",
    },
    "PlanResult": {"checkpoint", "inventory", "plan", "shape"},
    "StagePlan": {"shards"},
    "StepEstimate": {"timeline"},
}

_HEAD = """\
# Python API

`import reshard` packs, exports, verifies, compares and reads checkpoints, without torch. `import runner` loads a rank's
stages into your own module, and has the classes that a model family of your own is written with
([own-models.md](own-models.md)). The commands of `reshard` call the same functions; `reshard pack`, which also shows,
divides and submits packs, calls the operation that `reshard.pack` calls. The names in `__all__` of the two packages are
public; all others are private, and so are attributes that this page does not list. Types of the fields of a `Manifest`
and a `Stage` are those of the format ([SPEC.md](../manifests/SPEC.md)), in `manifests/schema.py`. Both packages have
type hints (`py.typed`). Importing them is cheap: each name is loaded when it is first used.

    import reshard, runner

    reshard.pack("./Llama-3.2-1B", "./pp2", "pp=2")
    stage = reshard.open("./pp2").stage(0)
    weights = stage.state_dict(framework="torch")       # by Hugging Face FQN
    runner.load_stages("./pp2", rank, model)            # or straight into a module on the meta device
    runner.save_stages("./pp2", rank, model, out, step=100, optimizer=adamw)    # and back, as a checkpoint

Runnable scripts:

- [examples/pack.py](../examples/pack.py): pack, verify, reshard and export, with progress;
- [examples/load_stage.py](../examples/load_stage.py): load a stage into your own module;
- [examples/train.py](../examples/train.py): train with torch's pipeline schedule on two ranks, and save the stages;
- [examples/dump_fsdp2.py](../examples/dump_fsdp2.py): dump a step of plain FSDP2 for `runner prove --against`;
- [examples/chat_rows.py](../examples/chat_rows.py): render conversations into rows of token ids;
- [examples/inspect_and_plot.py](../examples/inspect_and_plot.py): inspect bundles and plot them.

Modules that others import:

- [examples/own_model.py](../examples/own_model.py) and [examples/own_tree.py](../examples/own_tree.py): decoders of
  your own; the entry point of a package names one, and `runner launch` trains it;
- [examples/preference_loss.py](../examples/preference_loss.py) and
  [examples/streaming_dataset.py](../examples/streaming_dataset.py): a loss and a dataset of your own, likewise;
- [examples/titan_start.py](../examples/titan_start.py): let torchtitan's trainer start from a packed folder; its
  config imports it;
- [examples/dump_torchtitan.py](../examples/dump_torchtitan.py): dump the first step of torchtitan's trainer.

Errors that a caller can fix are subclasses of `UserError`, with `where`, `problem`, `hint` and a stable `code`,
listed in [errors.md](errors.md). Any other exception is a bug.
"""


def render() -> str:
    """Return the page as Markdown."""
    return "\n".join([_HEAD, *(line for package in PACKAGES for line in _package(package))])


def _package(package: str) -> Iterator[str]:
    module = importlib.import_module(package)
    found = {name: getattr(module, name) for name in module.__all__ if not name.startswith("_")}
    yield f"## {package}\n"
    for name, member in found.items():
        if inspect.isfunction(member):
            yield from _entry(f"{package}.{name}", name, member)
    for name, member in found.items():
        if inspect.isclass(member):
            yield f"### class `{package}.{name}`\n"
            yield _text(member)
            if fields := _fields(member):
                yield f"Fields: {', '.join(fields)}.\n"
            for attribute, method in vars(member).items():
                if inspect.isfunction(method) and (attribute == "__call__" or _is_listed(member, attribute)):
                    yield from _entry(f"{name}.{attribute}", attribute, method)


def _fields(member: type) -> list[str]:
    fields = getattr(member, "__dataclass_fields__", {})
    kept = [f"`{name}: {field.type}`" for name, field in fields.items() if _is_listed(member, name)]
    kept += [f"`{name}`" for name in getattr(member, "_fields", ())]
    inherited = {name: found for base in reversed(member.__mro__) for name, found in vars(base).items()}
    properties = [
        f"`{name}: {_type_of(found)}`"
        for name, found in inherited.items()
        if isinstance(found, property | cached_property) and _is_listed(member, name)
    ]
    return kept + properties


def _is_listed(member: type, name: str) -> bool:
    return not name.startswith("_") and name not in _INTERNAL.get(member.__name__, ())


def _type_of(found: property | cached_property[object]) -> str:
    getter = found.fget if isinstance(found, property) else found.func
    return str(inspect.signature(getter).return_annotation) if getter else "object"


def _entry(title: str, name: str, function: Callable[..., object]) -> Iterator[str]:
    yield f"### `{title}`\n"
    yield f"```python\n{_signature(name, function)}\n```\n"
    yield _text(function)


def _signature(name: str, function: Callable[..., object]) -> str:
    """Return a signature as written in the code, on one line where it fits."""
    shown, is_keyword = list[str](), False
    signature = inspect.signature(function)
    for parameter in signature.parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and not is_keyword:
            shown, is_keyword = [*shown, "*"], True
        text = (
            parameter.name if parameter.annotation is parameter.empty else f"{parameter.name}: {parameter.annotation}"
        )
        default = "…" if inspect.isfunction(parameter.default) else repr(parameter.default)
        shown.append(text if parameter.default is parameter.empty else f"{text} = {default}")
    line = f"{name}({', '.join(shown)}) -> {signature.return_annotation}"
    if len(line) <= 110:
        return line
    lines = "".join(f"    {text},\n" for text in shown)
    return f"{name}(\n{lines}) -> {signature.return_annotation}"


def _text(member: object) -> str:
    """Return a docstring as Markdown: sections that are indented there become blocks of text here."""
    lines = (inspect.getdoc(member) or "").splitlines()
    shown = []
    for line in lines:
        shown += ["", line, ""] if line in ("Raises:", "Example:") else [line]
    return "\n".join(shown) + "\n"
