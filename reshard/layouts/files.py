"""Explicit layouts: a TOML or JSON file of module lists, read and written."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from manifests.errors import InputError, LayoutError, UsageError
from manifests.jsontext import kind_of, parse_json_object
from manifests.store import write_file
from reshard.formatting import did_you_mean, in_one_line, list_words
from reshard.layouts.degrees import Degrees, agreed_ranks, layout_of
from reshard.layouts.model import (
    MAX_STAGES,
    SCHEDULES,
    Inventory,
    NameProblem,
    Names,
    Request,
    StageLayout,
    compress_modules,
    module_ranges,
)
from stores.folders.probe import check_new_file

FILE_KEYS = ("spec", "stages", "num_ranks", "style", "schedule")
MOST_BYTES = 4 << 20
MOST_SHOWN = 10
_MOST_SPEC = 16384


def read_file(request: Request) -> StageLayout:
    """Read a file of module lists, one per stage.

    A file has `stages` and may have `num_ranks`, `style`, `schedule`, and `spec`, which a manifest records instead of
    the file's name; a JSON file may be a bare list of lists (torchtitan's and NeMo AutoModel's
    `module_fqns_per_model_part`). Names are Hugging Face's or torchtitan's, full or short; `layers.0-7` is a range and
    `layers.*` every layer. The order within a stage is free.
    """
    path = in_one_line(request.spec.strip())
    document = _load(Path(request.spec.strip()), path)
    stages = _stages(document.get("stages"), path)
    num_ranks = agreed_ranks(_num_ranks(document.get("num_ranks"), path), request)
    style, schedule = _word(document, "style", ("loop", "v"), path), _word(document, "schedule", SCHEDULES, path)
    degrees = Degrees.of(num_ranks=num_ranks, style=style, schedule=schedule)
    layout = layout_of(request, _bounds(stages, request.inventory, path), degrees)
    return replace(layout, spec=_spec(document["spec"], path)) if "spec" in document else layout


def write_layout(layout: StageLayout, path: Path) -> None:
    """Write a layout as a .toml or .json file of module lists, which can express every layout."""
    write_file(path, (_to_json if path.suffix == ".json" else to_toml)(layout).encode())


def check_layout_file(path: Path, *, force: bool) -> None:
    """Check that a layout can be written to a file later."""
    if path.suffix not in (".toml", ".json"):
        problem = f"expected a name that ends in .toml or .json, found {path.name[:80]!r}"
        raise UsageError("--write", problem, "write --write layout.toml", code="options.layout-suffix")
    check_new_file(path, "--write", force=force)


def _to_json(layout: StageLayout) -> str:
    schedule = {"schedule": layout.schedule} if layout.schedule else {}
    placement = {"num_ranks": layout.placement.num_ranks, "style": layout.placement.style}
    stages = [module_ranges(stage) for stage in layout.stages]
    return json.dumps({"spec": in_one_line(layout.spec), **placement, **schedule, "stages": stages}, indent=1) + "\n"


def to_toml(layout: StageLayout) -> str:
    lines = [f"spec = {json.dumps(in_one_line(layout.spec), ensure_ascii=False)}"]
    lines += [f"num_ranks = {layout.placement.num_ranks}", f'style = "{layout.placement.style}"']
    if layout.schedule:
        lines.append(f'schedule = "{layout.schedule}"')
    stages = [f"    {json.dumps(module_ranges(stage), ensure_ascii=False)}," for stage in layout.stages]
    return "\n".join([*lines, "stages = [", *stages, "]", ""])


def _load(file: Path, path: str) -> Mapping[str, object]:
    try:
        if not file.is_file():
            raise LayoutError(
                path,
                "no such file",
                "a layout that ends in .toml or .json is the path of a file of module lists",
                code="layout.no-file",
            )
        if file.stat().st_size > MOST_BYTES:
            raise LayoutError(path, f"expected at most {MOST_BYTES} bytes", code="layout.file-too-large")
        data = file.read_bytes()
    except (OSError, ValueError) as error:  # ValueError: a null byte in the path
        raise LayoutError(path, f"cannot be read: {error}", code="layout.unreadable") from error
    document = _parse(data, path)
    for key in document:
        if key not in FILE_KEYS:
            hint = did_you_mean(key, FILE_KEYS) or f"known keys: {list_words(FILE_KEYS, 'and')}"
            raise LayoutError(f"{path}: {key}", "unknown key", hint, code="layout.unknown-key")
    return document


def _parse(data: bytes, path: str) -> Mapping[str, object]:
    if path.lower().endswith(".json"):
        if not data.lstrip().startswith(b"["):
            return parse_json_object(data, path)
        try:
            return {"stages": json.loads(data)}
        except (RecursionError, ValueError) as error:
            raise LayoutError(path, f"is not JSON: {error}", code="layout.not-json") from error
    try:
        return tomllib.loads(data.decode("utf-8"))
    except (RecursionError, ValueError) as error:  # UnicodeDecodeError and TOMLDecodeError too
        raise LayoutError(path, f"is not TOML: {error}", code="layout.not-toml") from error


def _stages(stages: object, path: str) -> list[list[str]]:
    if not isinstance(stages, list) or not stages:
        shown = "nothing" if stages is None else "an empty list" if stages == [] else kind_of(stages)
        hint = 'write one list per stage: [["embed_tokens", "layers.0-7"], [..., "lm_head"]]'
        raise _invalid(f"{path}: stages", f"expected a list of lists of module names, found {shown}", hint)
    if len(stages) > MAX_STAGES:
        raise LayoutError(
            f"{path}: stages", f"expected at most {MAX_STAGES}, found {len(stages)}", code="layout.too-many-stages"
        )
    for index, stage in enumerate(stages):
        if not isinstance(stage, list):
            raise _invalid(f"{path}: stages[{index}]", f"expected a list of module names, found {kind_of(stage)}")
        for place, name in enumerate(stage):
            if not isinstance(name, str):
                raise _invalid(f"{path}: stages[{index}][{place}]", f"expected a module name, found {kind_of(name)}")
    return stages


def _spec(value: object, path: str) -> str:
    if not isinstance(value, str) or not value.isprintable() or len(value) > _MOST_SPEC:
        problem = f"expected at most {_MOST_SPEC} printable characters, found {_shown(value)}"
        raise _invalid(f"{path}: spec", problem)
    return value


def _num_ranks(value: object, path: str) -> int | None:
    if value is None:
        return None
    if type(value) is not int or not 1 <= value <= MAX_STAGES:
        raise _invalid(f"{path}: num_ranks", f"expected a whole number from 1 to {MAX_STAGES}, found {_shown(value)}")
    return value


def _word(
    document: Mapping[str, object], key: str, choices: Sequence[str] | Mapping[str, object], path: str
) -> str | None:
    value = document.get(key)
    if value is None:
        return None
    for word in choices:
        if isinstance(value, str) and value.lower() == word.lower():
            return word
    raise _invalid(f"{path}: {key}", f"expected {list_words(choices)}, found {_shown(value)}")


def _invalid(where: str, problem: str, hint: str = "") -> LayoutError:
    return LayoutError(where, problem, hint, code="layout.invalid-field")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return repr(value[:40])
    return str(value) if type(value) is int and abs(value) < 10**9 else kind_of(value)


def _bounds(stages: list[list[str]], inventory: Inventory, path: str) -> tuple[int, ...]:
    """Check that every module is on one stage, in order, and return the bounds. Reports every problem."""
    names, problems = Names(inventory), list[InputError]()
    stage_of: dict[int, int] = {}
    for index, stage in enumerate(stages):
        where = f"{path}: stages[{index}]"
        for entry in stage:
            try:
                positions = names.positions_of(entry)
            except NameProblem as problem:
                problems.append(LayoutError(where, str(problem), problem.hint, code="layout.unknown-module"))
                continue
            for position in positions:
                if position in stage_of:
                    twice = f"{inventory.modules[position]} is already on stage {stage_of[position]}"
                    hint = "list it on one stage only"
                    problems.append(LayoutError(where, twice, hint, code="layout.module-twice"))
                stage_of.setdefault(position, index)
    problems = problems or _order_problems(stage_of, inventory, path) or _uncovered(stage_of, inventory, path)
    if problems:
        raise _joined(problems, path)
    ends = [0] * (len(stages) + 1)
    for position in range(len(inventory.modules)):
        ends[stage_of[position] + 1] = position + 1
    for index in range(1, len(ends)):
        ends[index] = max(ends[index], ends[index - 1])
    return tuple(ends)


def _order_problems(stage_of: Mapping[int, int], inventory: Inventory, path: str) -> list[InputError]:
    """Return the problem of the first modules that are on an earlier stage than a module before them."""
    latest = 0  # the latest stage so far, and the module that is there
    before = ""
    for position in sorted(stage_of):
        stage, module = stage_of[position], inventory.modules[position]
        if stage < latest:
            here = [at for at in range(position, len(inventory.modules)) if stage_of.get(at) == stage]
            shown = compress_modules(inventory.modules[at] for at in here)
            problem = f"{shown} runs after {before}, which is on stage {latest}"
            hint = "list the stages in the order in which the modules run"
            return [LayoutError(f"{path}: stages[{stage}]", problem, hint, code="layout.wrong-order")]
        latest, before = stage, module
    return []


def _uncovered(stage_of: Mapping[int, int], inventory: Inventory, path: str) -> list[InputError]:
    missing = [position for position in range(len(inventory.modules)) if position not in stage_of]
    if not missing:
        return []
    before = [position for position in stage_of if position < missing[0]]
    stage = stage_of[max(before)] if before else min(stage_of.values(), default=0)
    shown = compress_modules(inventory.modules[position] for position in missing)
    first = inventory.modules[missing[0]]
    hint = f"add {first} to stage {stage}, or to the start of the next"
    return [LayoutError(f"{path}: stages", f"missing {shown}", hint, code="layout.uncovered-module")]


def _joined(problems: list[InputError], path: str) -> InputError:
    """Return an error that lists all problems; its code and hint are the first one's."""
    first = problems[0]
    if len(problems) == 1:
        return first
    lines = [f"\n  {error.where.removeprefix(path + ': ')}: {error.problem}" for error in problems[:MOST_SHOWN]]
    rest = f"\n  and {len(problems) - MOST_SHOWN} more" if len(problems) > MOST_SHOWN else ""
    return first.changed(where=path, problem=f"{len(problems)} problems:{''.join(lines)}{rest}")
