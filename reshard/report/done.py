"""What commands print when they are done; of inspect, the manifest, or what other trainers' tables say."""

from __future__ import annotations

import shlex
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from manifests.codec import manifest_document
from manifests.command.console import table
from manifests.command.sizes import show_bytes
from manifests.errors import printable
from manifests.index import INDEX_NAME, has_index
from manifests.optimizer_state import describe_optimizer
from manifests.safetensors import nbytes_of
from manifests.schema import Manifest
from reshard.formats.table import Listing, export_targets
from reshard.formatting import count_of, counted, describe_layout, show_numbers, tie_lines
from reshard.layouts.model import compress_modules
from reshard.packing.hub_sha256 import HubReport
from reshard.packing.options import PackResult
from reshard.transforms.conversion import ExportDtype
from stores.address import is_url
from stores.bundles import Bundles, TensorAt
from stores.open import Address

if TYPE_CHECKING:
    from reshard.checks.check import CheckResult
    from reshard.checks.diff import DiffResult, TensorDifference
    from reshard.checks.verify import VerifyResult
    from reshard.formats.table import ExportResult
    from reshard.packing.push import PushResult


def hub_lines(report: HubReport) -> list[str]:
    """Return lines on which weight files were verified against the hub's SHA-256, and which were not."""
    lines = []
    if report.verified:
        lines.append(f"verified against the hub: {counted(len(report.verified), 'weight file')} (SHA-256)")
    if report.unverified:
        names = ", ".join(report.unverified[:3]) + (", ..." if len(report.unverified) > 3 else "")
        why = "not all of their bytes are in the output; --verify-source downloads the rest"
        lines.append(f"not verified against the hub: {counted(len(report.unverified), 'weight file')} ({names}): {why}")
    return lines


def pack_json(done: PackResult) -> dict[str, Any]:
    if done.part is not None:
        return {"version": 1, "part": done.part.number, "of": done.part.of, "nbytes": done.nbytes}
    hub = {"hub_verified": list(done.hub.verified), "hub_unverified": list(done.hub.unverified)}
    return (hub if any(hub.values()) else {}) | {
        "version": 1,
        "manifest": done.path,
        "num_stages": done.num_stages,
        "num_ranks": done.num_ranks,
        "num_tensors": done.num_tensors,
        "nbytes": done.nbytes,
        "virtual_nbytes": done.virtual_nbytes,
        "num_threads": done.used.num_threads,
        "num_streams": done.used.num_streams,
    }


def pack_text(done: PackResult) -> str:
    if done.part is not None:
        packed = f"packed part {done.part.number} of {done.part.of}: {show_bytes(done.nbytes)}"
        return f"{packed}\nnext, after all parts: reshard commit {shlex.quote(str(done.out))}"
    training = done.manifest.training
    packed, virtual = show_bytes(done.nbytes), show_bytes(done.virtual_nbytes)
    how = f"{packed} copied, {virtual} referenced" if done.manifest.virtual else packed
    place = shlex.quote(done.path)
    fetch, place = (f"reshard pack {place} --out DIR; ", "DIR") if is_url(done.out) else ("", place)
    stages = counted(done.num_stages, "stage")
    state = " and their optimizer state" if training and training.optimizer else ""
    speed = f", {done.used.num_streams} requests at a time" if done.used.num_streams else ""
    lines = [f"packed {done.num_tensors} tensors{state}, {how}, in {stages}{speed}: {done.path}"]
    if not has_index(done.manifest):
        why = "bundles are virtual" if done.manifest.virtual else "tensors are in slices; --merge-slices merges them"
        lines.append(f"not a Hugging Face folder, without {INDEX_NAME}: {why}")
    lines.append(f"next: {fetch}runner launch {place} --nproc-per-node {done.num_ranks} -- --help")
    return "\n".join(lines)


def export_json(done: ExportResult, form: str, out: Address) -> dict[str, Any]:
    return {
        "version": 1,
        "out": str(out),
        "format": form,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "same_headers": done.identical,
        "flags": done.flags,
        "casts": [{"from": before, "to": after, "num_tensors": num} for (before, after), num in done.casts.items()],
    }


def export_text(done: ExportResult, form: str, names: str, dtype: ExportDtype, out: Address) -> str:
    _, target = export_targets()[form]
    written = f"exported {counted(done.num_files, 'file')}, {show_bytes(done.nbytes)}"
    if target.reader:
        reader = f"{target.reader.format(out=shlex.quote(str(out)))} {done.flags}".rstrip()
        lines = [f"{written}, for {reader}", *target.notes.get(names, "").splitlines()]
        return "\n".join(lines + [f"cast {num} tensors from {a} to {b}" for (a, b), num in done.casts.items()])
    how = "headers as in the source" if done.identical else "new headers: dtypes or tensors differ from the source"
    lines = [f"{written} of weights ({how}): {out}"]
    why = ", as in the source; --dtype fp32 casts losslessly" if dtype == "source" else ""
    lines += [f"cast {num} tensors from {before} to {after}{why}" for (before, after), num in done.casts.items()]
    return "\n".join(lines)


def verify_json(done: VerifyResult) -> dict[str, Any]:
    return {
        "version": 1,
        "equal": done.equal,
        "num_tensors": done.num_tensors,
        "nbytes": done.nbytes,
        "compared_nbytes": done.compared_nbytes,
        "differences": [
            {"where": finding.where, "problem": finding.problem, **({"code": finding.code} if finding.code else {})}
            for finding in done.differences
        ],
        **({} if done.signature is None else {"signature": done.signature}),
        **({"code": done.code} if done.code else {}),
    }


def verify_text(done: VerifyResult, manifest: str) -> str:
    verdict = _verdict(done, manifest)
    if done.signature is None:
        return verdict
    changed = f"the manifest is the signed one, and its files were changed after that: do not use them [{done.code}]"
    lines = [f"signature verified: {printable(done.signature)}", *([changed] if done.differences else []), verdict]
    return "\n".join(lines)


def _verdict(done: VerifyResult, manifest: str) -> str:
    read = f"{done.num_tensors} tensors, {show_bytes(done.nbytes)}"
    unread = done.nbytes - done.compared_nbytes
    unverified = f"; {show_bytes(unread)} of data not verified" if unread else ""
    if not done.differences and done.source and done.num_beyond:
        which = f"{done.num_tensors - done.num_beyond} weights equal those of {done.source}"
        return f"verified {read}: {which}, which has none of the {done.num_beyond} optimizer tensors"
    if not done.differences and done.source:
        return f"verified {read}: all tensors equal those of {done.source}"
    if not done.differences and unread:
        same = "sizes, headers and fingerprints match the manifest"
        return f"checked {read}: {same}{unverified}"
    if not done.differences:
        return f"verified {read}: all digests match the manifest"
    count = count_of(done.differences, "problem")
    lines = [f"{manifest}: {count} found; checked {read}{unverified}"]
    lines += [printable(f"  {finding.where}: {finding.problem}", lines=False) for finding in done.differences]
    how = ", or pack or save the checkpoint again" if done.signature is None else " from whoever signed the checkpoint"
    hint = () if done.source else (f"hint: copy the damaged files again{how}",)
    return "\n".join((*lines, *hint))


def push_json(done: PushResult) -> dict[str, Any]:
    return {"version": 1, **asdict(done)}


def push_text(done: PushResult, folder: str) -> str:
    place = done.repository + (f"@{done.branch}" if done.branch != "main" else "")
    kind = "private" if done.is_private else "public"
    size = f"{counted(done.num_files, 'file')}, {show_bytes(done.nbytes)}"
    if not done.is_new:
        return f"{place} ({kind}) has all of {shlex.quote(folder)} already: {size}, commit {done.revision[:12]}"
    removed = [f"removed, of another model: {', '.join(done.removed)}"] if done.removed else []
    lines = [f"pushed {shlex.quote(folder)} to {place} ({kind}): {size}, commit {done.revision[:12]}", *removed]
    return "\n".join((*lines, f"verify: reshard verify {place}"))


def diff_json(done: DiffResult) -> dict[str, Any]:
    differences = [{**asdict(difference), "relative": difference.relative} for difference in done.differences]
    return {"version": 1, "equal": done.equal, **asdict(replace(done, differences=())), "differences": differences}


def diff_text(done: DiffResult, lists_casts: bool) -> str:
    """Return a line for each tensor that differs; those that were cast have one for each pair of dtypes."""
    a, b = done.layouts
    lines = [f"layout: {a}"] if a == b else [f"layout of A: {a}", f"layout of B: {b}"]
    moved = f" ({done.num_moved} on another stage)" if done.num_moved else ""
    sliced = f", {done.num_resliced} are equal but sliced differently" if done.num_resliced else ""
    num_different = sum(difference.num_tensors for difference in done.differences)
    lines.append(f"{done.num_equal} tensors are equal{moved}{sliced}, {num_different} differ")
    casts: dict[tuple[str, str, str], list[TensorDifference]] = {}
    for difference in done.differences:
        is_of_zeros = difference.norm_a == 0 != difference.norm
        if difference.dtypes is None or lists_casts or is_of_zeros or not difference.is_finite:
            lines.append(_line(difference))
        else:
            casts.setdefault((difference.holds, *difference.dtypes), []).append(difference)
    return "\n".join([*lines, *(_cast_line(*of, cast) for of, cast in casts.items())])


def _cast_line(holds: str, a: str, b: str, cast: list[TensorDifference]) -> str:
    values = "values not compared"
    if all(difference.norm is not None for difference in cast):
        most = max(difference.relative or 0.0 for difference in cast)
        values = f"values differ by up to {most:.2g} of A's norm"
        if not any(difference.norm for difference in cast):
            values = "same values"
    return f"  {holds} of {counted(len(cast), 'tensor')}: {a} in A, {b} in B, {values}; --tensors lists them"


def _line(difference: TensorDifference) -> str:
    line = f"  {difference.holds} {difference.fqn}: {difference.problem}"
    if difference.norm is None or difference.norm_a is None:
        return line
    share = f", {difference.relative:.2g} of A's {difference.norm_a:.3g}" if difference.relative is not None else ""
    return f"{line}; B - A has norm {difference.norm:.3g}{share}"


def check_json(done: CheckResult) -> dict[str, Any]:
    return {
        "version": 1,
        "ok": done.ok,
        "location": done.location,
        "kind": done.kind,
        "num_tensors": done.num_tensors,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "read_nbytes": done.read_nbytes,
        "problems": [asdict(finding) for finding in done.findings],
    }


def check_text(done: CheckResult) -> str:
    """Return one line for each problem, and the verdict last, where a log ends."""
    lines = []
    for finding in done.findings:
        lines.append(f"{finding.where}: {finding.problem} [{finding.code}]")
        lines += [f"  hint: {finding.hint}"] if finding.hint else []
    files = counted(done.num_files, "file")
    what = f"{done.num_tensors} tensors in {files}, {show_bytes(done.nbytes)}"
    read = f"{show_bytes(done.read_nbytes)} of data read" if done.read_nbytes else "headers only, no data read"
    if done.ok:
        wrote = "; wrote digests.json" if done.wrote_digests else ""
        lines.append(f"ok: {done.location}: no problem found ({what}; {read}){wrote}")
    else:
        count = count_of(done.findings, "problem")
        lines.append(f"FAILED: {done.location}: {count} found ({what}; {read})")
    return "\n".join(printable(line, lines=False) for line in lines)


def inspect_text(manifest: Manifest, bundles: Bundles, with_tensors: bool) -> str:
    rows = [
        (
            str(stage.index),
            str(stage.rank),
            str(stage.virtual),
            compress_modules(stage.modules) or "(empty)",
            str(stage.num_tensors),
            f"{stage.num_params:,}",
            show_bytes(stage.nbytes),
        )
        for stage in manifest.stages
    ]
    head = ("stage", "rank", "vpp", "modules", "tensors", "params", "bytes")
    training = manifest.training
    optimizer = training.optimizer if training else None
    lines = [
        f"{manifest.model.architecture}, {manifest.model.num_layers} layers, {manifest.model.num_params:,} parameters",
        f"from {manifest.source.kind}: {manifest.source.location}",
        f"written by {manifest.created_by}"
        + (f" after step {training.step}, {training.num_tokens:,} tokens" if training else "")
        + (f", with the optimizer state of {describe_optimizer(optimizer)}" if optimizer else ""),
        f"layout {describe_layout(manifest.layout)}",
        table(head, rows, left_columns=frozenset({"modules"})),
        *tie_lines(manifest.ties),
        *_virtual_lines(manifest),
        "files: " + ", ".join(file.path for file in manifest.files),
    ]
    if with_tensors:
        columns = ("stage", "tensor", "dtype", "shape", "blake3")
        cells = [_row(stage, tensor) for stage, tensor in _tensors(manifest, bundles)]
        lines.append(table(columns, cells, left_columns=frozenset(columns[1:])))
    return printable("\n".join(lines))


def inspect_json(manifest: Manifest, bundles: Bundles, with_tensors: bool) -> dict[str, Any]:
    document = {"version": 1, "manifest": manifest_document(manifest)}
    tensors = (
        {"tensors": [_object(stage, tensor) for stage, tensor in _tensors(manifest, bundles)]} if with_tensors else {}
    )
    return {**document, **tensors}


def _tensors(manifest: Manifest, bundles: Bundles) -> list[tuple[int, TensorAt]]:
    bundles.read_ahead(manifest.stages)
    return [(stage.index, tensor) for stage in manifest.stages for tensor in bundles.tensors_on(stage)]


def _row(stage: int, tensor: TensorAt) -> tuple[str, ...]:
    return str(stage), tensor.name, tensor.dtype, _shape(tensor), tensor.digest or ""


def _object(stage: int, tensor: TensorAt) -> dict[str, Any]:
    return {
        "stage": stage,
        "fqn": tensor.name,
        "dtype": tensor.dtype,
        "shape": list(tensor.shape),
        "offset": list(tensor.offset),
        "whole_shape": list(tensor.whole_shape),
        "nbytes": tensor.nbytes,
        "blake3": tensor.digest,
    }


def _shape(tensor: TensorAt) -> str:
    if tensor.shape == tensor.whole_shape:
        return str(list(tensor.shape))
    return f"{list(tensor.shape)} at {list(tensor.offset)} of {list(tensor.whole_shape)}"


def _virtual_lines(manifest: Manifest) -> list[str]:
    virtual = manifest.virtual
    if virtual is None:
        return []
    place = virtual.location + (f"@{virtual.revision}" if virtual.revision else "")
    stages = show_numbers(stage.index for stage in manifest.stages if stage.spans)
    return [f"virtual: stages {stages} reference {len(virtual.files)} files in {place}"]


def listing_json(listing: Listing, with_tensors: bool) -> dict[str, Any]:
    parts = {part: {"num_tensors": num, "nbytes": nbytes} for part, num, nbytes in _parts(listing)}
    listed = [
        {
            "name": tensor.name,
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "nbytes": nbytes_of(tensor.dtype, tensor.shape),
            "num_chunks": tensor.num_chunks,
        }
        for tensor in listing.tensors
    ]
    head = {"version": 1, "format": listing.format, "num_files": listing.num_files, "parts": parts}
    return {**head, "other_parts": list(listing.others), **({"tensors": listed} if with_tensors else {})}


def listing_text(listing: Listing, with_tensors: bool) -> str:
    rows = [(part, str(num), show_bytes(nbytes)) for part, num, nbytes in _parts(listing)]
    lines = [
        f"{listing.title}, {counted(listing.num_files, 'file')}",
        table(("part", "tensors", "bytes"), rows, left_columns=frozenset({"part"})),
    ]
    if listing.others:
        lines.append(f"other values: {', '.join(listing.others)}")
    if with_tensors:
        columns = ("tensor", "dtype", "shape", "chunks")
        cells = [(item.name, item.dtype, str(list(item.shape)), str(item.num_chunks)) for item in listing.tensors]
        lines.append(table(columns, cells, left_columns=frozenset(columns[:3])))
    return printable("\n".join(lines))


def _parts(listing: Listing) -> list[tuple[str, int, int]]:
    parts = {tensor.part: (0, 0) for tensor in listing.tensors}
    for tensor in listing.tensors:
        num, nbytes = parts[tensor.part]
        parts[tensor.part] = (num + 1, nbytes + nbytes_of(tensor.dtype, tensor.shape))
    return [(part, num, nbytes) for part, (num, nbytes) in parts.items()]
