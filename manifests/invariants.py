"""Invariants across the manifest's fields. Every violation is reported, not only the first."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from manifests.digest import is_digest
from manifests.errors import ManifestError
from manifests.models.shape import ModelShape, description_problems, module_of
from manifests.paths import problem_with_path
from manifests.schema import (
    WEIGHTS,
    AuxiliaryFile,
    Manifest,
    OriginalFile,
    Shard,
    Stage,
)
from manifests.training_state import training_problems

MANIFEST_NAME = "manifest.json"
SOURCE_NAME = "source.json"
SOURCE_FILES = "source-files/"  # of files that describe the files of the source, and not those beside them
# How the source of weights that pack --dequantize made plain is quantized.
QUANTIZED_CONFIG, QUANTIZED_SOURCE = "quantized-config.json", "quantized-source.json"
_MOST_SHOWN = 20
_Named = Shard | AuxiliaryFile | OriginalFile


def check_manifest(manifest: Manifest, where: str = "manifest.json") -> None:
    """Check the manifest's invariants.

    Raises:
        ManifestError: listing every violation.
    """
    _raise_all(list(problems(manifest)), where)


def check_model(manifest: Manifest, shape: ModelShape, where: str = "manifest.json") -> None:
    """Check that the stages are the config's model: each module once, in order, with the same ties.

    Raises:
        ManifestError: listing every violation.
    """
    _raise_all(list(_model_problems(manifest, shape)), where)


def as_packed(shape: ModelShape, manifest: Manifest) -> ModelShape:
    """Return the config's shape without the ties of weights that the source stored with different values.

    The manifest has no such tie, and counts both weights. What a description ties is never stored so.
    """
    tied = {frozenset(member.fqn for member in group.members) for group in manifest.ties}
    untied = replace(shape, ties=tuple(group for group in shape.ties if frozenset(group) in tied))
    if untied.ties == shape.ties or manifest.model.description is not None:
        return shape
    modules = {module for stage in manifest.stages for module in stage.modules}
    stored = untied.without(untied.optional.difference(modules))
    return untied if stored.num_params == manifest.model.num_params else shape


def problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield each violation as (path, message)."""
    yield from _description_problems(manifest)
    yield from _layout_problems(manifest)
    yield from _stage_problems(manifest)
    yield from _file_problems(manifest)
    yield from _tie_problems(manifest)
    yield from _virtual_problems(manifest)
    yield from training_problems(manifest)


def _raise_all(found: list[tuple[str, str]], where: str) -> None:
    if not found:
        return
    if len(found) == 1:
        raise ManifestError(f"{where}: {found[0][0]}", found[0][1], code="manifest.inconsistent")
    lines = [f"\n  {path}: {problem}" for path, problem in found[:_MOST_SHOWN]]
    rest = f"\n  and {len(found) - _MOST_SHOWN} more" if len(found) > _MOST_SHOWN else ""
    problem = f"{len(found)} problems:{''.join(lines)}{rest}"
    raise ManifestError(where, problem, code="manifest.inconsistent")


def _model_problems(manifest: Manifest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    modules = tuple(module for stage in manifest.stages for module in stage.modules)
    shape = shape.without(shape.optional.difference(modules))
    for name in ("architecture", "num_layers", "num_params"):
        expected, found = getattr(shape, name), getattr(manifest.model, name)
        if found != expected:
            yield f"model.{name}", f"expected {expected} (config.json), found {found}"
    there = set(modules)
    if missing := [module for module in shape.modules if module not in there]:
        yield "stages", f"no stage has {', '.join(missing[:5])}{', ...' if len(missing) > 5 else ''}"
    elif modules == shape.modules:
        yield from _param_problems(manifest, shape)
    else:
        odd = next(
            module for module, expected in zip(modules, (*shape.modules, ""), strict=False) if module != expected
        )
        yield "stages", f"{odd!r} is not the next module of the model (config.json)"
    expected_ties = {frozenset(group) for group in shape.ties}
    if {frozenset(member.fqn for member in group.members) for group in manifest.ties} != expected_ties:
        shown = " and ".join(" = ".join(group) for group in shape.ties) or "none"
        yield "ties", f"expected {shown} (config.json)"


def _param_problems(manifest: Manifest, shape: ModelShape) -> Iterator[tuple[str, str]]:
    fqns = shape.by_module()
    for position, stage in enumerate(manifest.stages):
        num_params = sum(shape.count_params(fqn) for module in stage.modules for fqn in fqns[module])
        for group in shape.ties:
            own = [fqn for fqn in group if module_of(fqn, stage.modules) is not None]
            num_params -= sum(map(shape.count_params, own[1:]))  # tied names on one stage are one parameter
        if stage.num_params != num_params:
            yield f"stages[{position}].num_params", f"expected {num_params} (config.json), found {stage.num_params}"


def _description_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    if manifest.model.description is not None:
        for field, problem, _ in description_problems(manifest.model.description):
            yield f"model.description.{field}", problem


def _layout_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    layout = manifest.layout
    if layout.num_stages != len(manifest.stages):
        yield "layout.num_stages", f"expected {len(manifest.stages)} (stages), found {layout.num_stages}"
    if layout.num_ranks * layout.num_virtual != layout.num_stages or layout.num_stages == 0:
        product = layout.num_ranks * layout.num_virtual
        yield (
            "layout.num_stages",
            f"expected num_ranks x num_virtual = {product}, at least 1, found {layout.num_stages}",
        )
    elif layout.style == "v" and layout.num_virtual != 2:
        yield "layout.num_virtual", f"expected 2 (style v), found {layout.num_virtual}"


def _stage_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    placement = None if any(_layout_problems(manifest)) else manifest.placement
    owners: dict[str, int] = {}
    for position, stage in enumerate(manifest.stages):
        path = f"stages[{position}]"
        if stage.index != position:
            yield f"{path}.index", f"expected {position}, found {stage.index}"
        if placement:
            for name, expected, found in (
                ("rank", placement.rank_of(position), stage.rank),
                ("virtual", placement.virtual_of(position), stage.virtual),
            ):
                if found != expected:
                    yield f"{path}.{name}", f"expected {expected} (style {placement.style}), found {found}"
        for module in stage.modules:
            if module in owners:
                yield f"{path}.modules", f"{module!r} is on stage {owners[module]} already"
            owners[module] = position
        yield from _nbytes_problems(stage, path)


def _nbytes_problems(stage: Stage, path: str) -> Iterator[tuple[str, str]]:
    in_shards = sum(shard.nbytes for shard in stage.shards if shard.holds == WEIGHTS)
    in_spans = sum(s.end - s.begin for s in stage.spans)
    if stage.shards and stage.spans:
        yield f"{path}.spans", "expected none: the stage has shards"
    elif stage.spans and stage.nbytes != in_spans:
        yield f"{path}.nbytes", f"expected {in_spans} (its spans), found {stage.nbytes}"
    elif not stage.spans and stage.nbytes > in_shards:
        yield f"{path}.nbytes", f"expected at most {in_shards} (its shards), found {stage.nbytes}"


def _file_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    named: list[tuple[str, _Named]] = [
        (f"stages[{i}].shards[{j}]", shard)
        for i, stage in enumerate(manifest.stages)
        for j, shard in enumerate(stage.shards)
    ]
    named += [(f"files[{i}]", file) for i, file in enumerate(manifest.files)]
    yield from _path_problems(named, {MANIFEST_NAME: "manifest.json itself"})
    for index, parent in enumerate(manifest.parents):
        if not is_digest(parent.digest):
            yield (
                f"parents[{index}].digest",
                f"expected blake3: and 64 hex digits, found {parent.digest[:80]!r}",
            )


def _path_problems(named: list[tuple[str, _Named]], seen: dict[str, str]) -> Iterator[tuple[str, str]]:
    for path, file in named:
        problem = problem_with_path(file.path)
        if problem:
            yield f"{path}.path", f"{problem}, found {file.path[:80]!r}"
        elif file.path in seen:
            yield f"{path}.path", f"{file.path!r} is the path of {seen[file.path]}"
        seen[file.path] = path
        if not is_digest(file.digest):
            yield f"{path}.digest", f"expected blake3: and 64 hex digits, found {file.digest[:80]!r}"


def _tie_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    seen: set[tuple[str, int]] = set()
    modules = [frozenset(stage.modules) for stage in manifest.stages]
    for position, group in enumerate(manifest.ties):
        path = f"ties[{position}]"
        if not group.replicas:
            yield f"{path}.replicas", "expected at least one"
        for member in group.members:
            if member.stage >= len(manifest.stages):
                yield path, f"{member.fqn!r}: expected a stage below {len(manifest.stages)}, found {member.stage}"
            elif module_of(member.fqn, modules[member.stage]) is None:
                yield path, f"{member.fqn!r} is not in a module of stage {member.stage}"
            if (member.fqn, member.stage) in seen:
                yield path, f"{member.fqn!r} is tied twice"
            seen.add((member.fqn, member.stage))


def _virtual_problems(manifest: Manifest) -> Iterator[tuple[str, str]]:
    virtual = manifest.virtual
    if virtual is None:
        for position, stage in enumerate(manifest.stages):
            if stage.spans:
                yield f"stages[{position}].spans", "expected none: virtual is null"
        return
    if manifest.training is not None:
        yield "training", "expected null: weights in original files are untrained"
    if not any(stage.spans for stage in manifest.stages):
        yield "virtual", "expected null: no stage has spans"
    if not virtual.location.startswith("/") and "://" not in virtual.location:
        yield "virtual.location", f"expected an absolute path or a URL, found {virtual.location[:80]!r}"
    yield from _path_problems([(f"virtual.files[{i}]", file) for i, file in enumerate(virtual.files)], {})
    yield from _span_problems(manifest, virtual.files)
    yield from _overlaps(manifest)


def _span_problems(manifest: Manifest, files: tuple[OriginalFile, ...]) -> Iterator[tuple[str, str]]:
    for position, stage in enumerate(manifest.stages):
        before = (0, 0)
        for number, span in enumerate(stage.spans):
            path = f"stages[{position}].spans[{number}]"
            if span.file >= len(files):
                yield f"{path}.file", f"expected less than {len(files)} (virtual.files), found {span.file}"
            elif not span.begin < span.end <= files[span.file].nbytes:
                limit = f"{files[span.file].nbytes} (virtual.files[{span.file}].nbytes)"
                yield path, f"expected begin < end <= {limit}, found {span.begin} and {span.end}"
            elif (span.file, span.begin) < before:
                yield path, "expected to begin after the span before it"
            before = (span.file, span.end)


def _overlaps(manifest: Manifest) -> Iterator[tuple[str, str]]:
    """Yield the spans that two stages share without a tie between them."""
    groups_of: dict[int, set[int]] = {}
    for number, group in enumerate(manifest.ties):
        for member in group.members:
            groups_of.setdefault(member.stage, set()).add(number)
    are_tied = cache(lambda one, other: not groups_of.get(one, set()).isdisjoint(groups_of.get(other, ())))
    spans = sorted((s.file, s.begin, s.end, i) for i, stage in enumerate(manifest.stages) for s in stage.spans)
    last_file, last_end, last_stage = -1, 0, -1  # of the span that reaches furthest so far
    for file, begin, end, stage in spans:
        is_shared = file == last_file and begin < last_end and stage != last_stage
        if is_shared and not are_tied(min(stage, last_stage), max(stage, last_stage)):
            shown = f"from byte {begin} of virtual.files[{file}] on"
            yield (
                f"stages[{stage}].spans",
                f"overlap those of stage {last_stage} {shown}, without a tie between the two stages",
            )
        if (file, end) > (last_file, last_end):
            last_file, last_end, last_stage = file, end, stage
