"""Virtual bundles: stages that refer to the tensors in the source's own files instead of copying them."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from manifests.errors import InputError, Parameter, UsageError
from manifests.schema import OriginalFile, Span, Virtual
from reshard.formatting import parse_numbers
from reshard.plans.pack_plan import PackPlan
from reshard.tensors.checkpoint import Checkpoint, OriginalFiles
from reshard.tensors.source_index import SUFFIX
from stores.base import Range, merge_ranges
from stores.bundles import TensorAt


@dataclass(frozen=True, kw_only=True, slots=True)
class References:
    """The virtual bundles of a manifest: the files, and by stage the spans and the number of tensors."""

    virtual: Virtual | None
    spans: Mapping[int, tuple[Span, ...]]
    num_tensors: Mapping[int, int]


def choose_stages(plan: PackPlan, virtual: bool, wanted: str | None) -> frozenset[int] | None:
    """Return the stages to pack, `wanted` being written as `0-3,7`. None: all of them.

    Raises:
        UsageError: there is no such stage, or both options are used.
    """
    if virtual and wanted is not None:
        problem = f"conflicts with {Parameter('virtual', True)}, which packs no stage"
        raise UsageError(Parameter("stages"), problem, "leave one of the two out", code="options.conflict")
    if virtual or wanted is None:
        return frozenset() if virtual else None
    chosen = parse_numbers(wanted)
    if chosen is None:
        problem = f"expected numbers, found {wanted[:80]!r}"
        raise UsageError(Parameter("stages"), problem, "write 0-3, or 0,2,5-7", code="options.bad-stages")
    if max(chosen) >= len(plan.stages):
        raise UsageError(
            Parameter("stages"),
            f"expected stages from 0 to {len(plan.stages) - 1}, found {max(chosen)}",
            "stages are numbered from 0",
            code="options.unknown-stage",
        )
    return chosen


def refer_to_others(checkpoint: Checkpoint, plan: PackPlan, packed: Collection[int] | None) -> References:
    """Return the tensors of all stages but the `packed` ones (None: all are) as spans of the files that they are in.

    Raises:
        InputError: a tensor is not in a weight file of the source, is not named by its FQN there, or is empty.
    """
    stages = [] if packed is None else [stage for stage in plan.stages if stage.index not in packed]
    if stages:
        _check_names(checkpoint)
    originals = checkpoint.originals or OriginalFiles(location="", revision=None, files={})
    names = {file: name for name, file in originals.files.items() if name.endswith(SUFFIX)}
    tied = {fqn for group in checkpoint.shape.ties for fqn in group}
    ranges: dict[int, dict[str, list[Range]]] = {}
    num_tensors: dict[int, int] = {}
    for stage in stages:
        here: dict[str, list[Range]] = {}
        seen: set[tuple[str, int]] = set()  # tied tensors, which may be the same bytes
        count = 0
        for tensor in (origin for shard in stage.shards for origin in shard.origins):
            name = names.get(tensor.file)
            if name is None:
                raise _no_original(tensor, checkpoint)
            if not tensor.nbytes:
                problem = "is empty, and virtual bundles can only refer to bytes"
                raise InputError(
                    f"{tensor.file}: {tensor.name!r}",
                    problem,
                    f"pack without {Parameter('virtual', True)}",
                    code="options.cannot-be-virtual",
                )
            if tensor.name in tied:
                if (name, tensor.begin) in seen:
                    continue
                seen.add((name, tensor.begin))
            count += 1
            _append(here.setdefault(name, []), tensor.begin, tensor.end)
        if here:
            ranges[stage.index], num_tensors[stage.index] = here, count
    used = [name for name in originals.files if any(name in here for here in ranges.values())]
    numbers = {name: number for number, name in enumerate(used)}
    return References(
        virtual=_pin(used, originals, checkpoint) if used else None,
        spans={index: tuple(_spans(here, numbers)) for index, here in ranges.items()},
        num_tensors=num_tensors,
    )


def _append(ranges: list[Range], begin: int, end: int) -> None:
    """Append a range, merging it with the last one if they are adjacent, as a million tensors may be."""
    if ranges and ranges[-1][1] == begin:
        ranges[-1] = (ranges[-1][0], end)
    else:
        ranges.append((begin, end))


def _check_names(checkpoint: Checkpoint) -> None:
    if not checkpoint.shape.base:  # stored names are FQNs
        return
    for shard in checkpoint.record.shards:
        for entry in shard.header.tensors:
            if (fqn := checkpoint.shape.fqn_of(entry.name)) != entry.name:
                raise InputError(
                    f"{shard.name}: {entry.name!r}",
                    f"is {fqn} in the model, but virtual bundles cannot rename tensors",
                    f"pack all stages, without {Parameter('virtual', True)}",
                    code="options.cannot-be-virtual",
                )


def _spans(here: Mapping[str, Sequence[Range]], numbers: Mapping[str, int]) -> list[Span]:
    merged = sorted((numbers[name], begin, end) for name, ranges in here.items() for begin, end in merge_ranges(ranges))
    return [Span(file=number, begin=begin, end=end) for number, begin, end in merged]


def _pin(used: Sequence[str], originals: OriginalFiles, checkpoint: Checkpoint) -> Virtual:
    digests = {shard.name: shard.digest for shard in checkpoint.record.shards}
    return Virtual(
        location=originals.location,
        revision=originals.revision,
        files=tuple(
            OriginalFile(path=name, nbytes=file.nbytes, pin=file.fingerprint, digest=digests[name])
            for name, file in ((name, originals.files[name]) for name in used)
        ),
    )


def _no_original(tensor: TensorAt, checkpoint: Checkpoint) -> InputError:
    return InputError(
        str(tensor.file),
        "is not a weight file of a Hugging Face folder, which virtual bundles require",
        f"pack its own source ({checkpoint.source.location}), or pack without {Parameter('virtual', True)}",
        code="options.cannot-be-virtual",
    )
