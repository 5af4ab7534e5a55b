"""A model that is described by its user: `--model model.toml`, or the manifest that recorded it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import fields

from manifests.schema import ModelDescription

_NAME = re.compile(r"[^.\s]+(\.[^.\s]+)*")  # words with dots between them
_REQUIRED = ("inputs", "layers", "outputs")
_OF_TENSORS = ("buffers", "ignored")  # the ends of names, which may begin with a dot


def description_problems(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    """Yield what no model can be, each as (field, problem, whether two modules overlap)."""
    yield from _invalid_names(description)
    if len(description.count) != len(description.layers):
        problem = f"expected a config field for each of {len(description.layers)} lists of layers"
        yield "count", f"{problem}, found {len(description.count)}", False
    if description.mtp is not None and len(description.layers) > 1:
        yield "mtp", "expected one list of layers, which MTP layers follow", False
    times = Counter(fqn for group in description.ties for fqn in group)
    for number, group in enumerate(description.ties):
        if len(group) < 2 or any(times[fqn] > 1 for fqn in group):
            yield f"ties[{number}]", "expected two or more names, each once", False
    yield from _overlaps(description)


def _invalid_names(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    for name in (field.name for field in fields(description)):
        value = getattr(description, name)
        if name in _REQUIRED and not value:
            yield name, "expected one or more names, found none", False
        for place, text in _texts(name, value):
            if not _NAME.fullmatch(text.removeprefix(".") if name in _OF_TENSORS else text):
                yield place, f"expected a name such as model.norm, found {text[:80]!r}", False


def _texts(place: str, value: object) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield place, value
    elif isinstance(value, tuple):
        for number, item in enumerate(value):
            yield from _texts(f"{place}[{number}]", item)


def _overlaps(description: ModelDescription) -> Iterator[tuple[str, str, bool]]:
    """Yield the modules that are listed twice, or inside another."""
    listed = [
        (f"{name}[{number}]", module)
        for name in (*_REQUIRED, "spare")
        for number, module in enumerate(getattr(description, name))
    ]
    first: dict[str, str] = {}
    for place, module in listed:
        if module in first:
            yield place, f"{module} is also {first[module]}", True
        first.setdefault(module, place)
    for place, module in listed:
        end = module.rfind(".")
        while end >= 0 and module[:end] not in first:
            end = module.rfind(".", 0, end)
        if end >= 0:
            around = module[:end]
            yield place, f"{module} is inside {around}, which is {first[around]}", True
