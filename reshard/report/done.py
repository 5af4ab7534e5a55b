"""What commands print when they are done."""

from __future__ import annotations

import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from manifests.command.sizes import show_bytes
from manifests.errors import printable
from manifests.index import INDEX_NAME, has_index
from reshard.formats.table import export_targets
from reshard.formatting import counted
from reshard.packing.hub_check import HubReport
from reshard.packing.result import PackResult
from reshard.transforms.cast import ExportDtype
from stores.address import is_url
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
    training = done.manifest.training
    packed, virtual = show_bytes(done.nbytes), show_bytes(done.virtual_nbytes)
    how = f"{packed} copied, {virtual} referenced" if done.manifest.virtual else packed
    place = shlex.quote(done.path)
    fetch, place = (f"reshard pack {place} --out DIR; ", "DIR") if is_url(done.out) else ("", place)
    stages = "1 stage" if done.num_stages == 1 else f"{done.num_stages} stages"
    state = " and their optimizer state" if training and training.optimizer else ""
    speed = f", {done.used.num_streams} requests at a time" if done.used.num_streams else ""
    lines = [f"packed {done.num_tensors} tensors{state}, {how}, in {stages}{speed}: {done.path}"]
    if not has_index(done.manifest):
        why = "bundles are virtual" if done.manifest.virtual else "tensors are in slices; --merge-slices merges them"
        lines.append(f"not a Hugging Face folder, without {INDEX_NAME}: {why}")
    lines.append(f"next: {fetch}runner launch {place} --nproc-per-node {done.num_ranks} -- --help")
    return "\n".join(lines)


def part_json(done: PackResult) -> dict[str, Any]:
    number, of = map(int, str(done.part).split("/"))
    return {"version": 1, "part": number, "of": of, "nbytes": done.nbytes}


def part_text(done: PackResult) -> str:
    packed = f"packed part {str(done.part).replace('/', ' of ')}: {show_bytes(done.nbytes)}"
    return f"{packed}\nnext, after all parts: reshard commit {shlex.quote(str(done.out))}"


def export_json(done: ExportResult, form: str, out: Address) -> dict[str, Any]:
    return {
        "version": 1,
        "out": str(out),
        "format": form,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "same_headers": done.identical,
        "casts": [{"from": before, "to": after, "num_tensors": num} for (before, after), num in done.casts.items()],
    }


def export_text(done: ExportResult, form: str, names: str, dtype: ExportDtype, out: Address) -> str:
    _, target = export_targets()[form]
    written = f"exported {done.num_files} files, {show_bytes(done.nbytes)}"
    if target.reader:
        lines = [f"{written}, for {target.reader.format(out=out)}", *target.notes.get(names, "").splitlines()]
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
            {"where": each.where, "problem": each.problem, **({"code": each.code} if each.code else {})}
            for each in done.differences
        ],
        **({} if done.signature is None else {"signature": done.signature}),
        **({"code": done.code} if done.code else {}),
    }


def verify_text(done: VerifyResult, manifest: str) -> str:
    found = _verified(done, manifest)
    if done.signature is None:
        return found
    changed = "the manifest is the signed one, and its files were changed after that: do not use them"
    lines = [f"signature verified: {printable(done.signature)}", *([changed] if done.differences else []), found]
    return "\n".join(lines)


def _verified(done: VerifyResult, manifest: str) -> str:
    read = f"{done.num_tensors} tensors, {show_bytes(done.nbytes)}"
    unread = done.nbytes - done.compared_nbytes
    if not done.differences and done.source and done.num_beyond:
        which = f"{done.num_tensors - done.num_beyond} weights equal those of {done.source}"
        return f"verified {read}: {which}, which has none of the {done.num_beyond} optimizer tensors"
    if not done.differences and done.source:
        return f"verified {read}: all tensors equal those of {done.source}"
    if not done.differences and unread:
        same = "sizes, headers and fingerprints match the manifest"
        return f"checked {read}: {same}; {show_bytes(unread)} of data not verified"
    if not done.differences:
        return f"verified {read}: all digests match the manifest"
    count = "1 problem" if len(done.differences) == 1 else f"{len(done.differences)} problems"
    lines = [f"{manifest}: {count} found; checked {read}"]
    lines += [printable(f"  {each.where}: {each.problem}", lines=False) for each in done.differences]
    hint = () if done.source else ("hint: copy the damaged files again, or pack or save the checkpoint again",)
    return "\n".join((*lines, *hint))


def push_json(done: PushResult) -> dict[str, Any]:
    return {
        "version": 1,
        "repository": done.repository,
        "branch": done.branch,
        "revision": done.revision,
        "is_new": done.is_new,
        "is_private": done.is_private,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "removed": list(done.removed),
    }


def push_text(done: PushResult, folder: Path) -> str:
    place = done.repository + (f"@{done.branch}" if done.branch != "main" else "")
    kind = "private" if done.is_private else "public"
    size = f"{done.num_files} files, {show_bytes(done.nbytes)}"
    if not done.is_new:
        return f"{place} ({kind}) has all of {shlex.quote(str(folder))} already: {size}, commit {done.revision[:12]}"
    removed = [f"removed, of another model: {', '.join(done.removed)}"] if done.removed else []
    lines = [f"pushed {shlex.quote(str(folder))} to {place} ({kind}): {size}, commit {done.revision[:12]}", *removed]
    return "\n".join((*lines, f"verify: reshard verify {place}"))


def diff_json(found: DiffResult) -> dict[str, Any]:
    return {
        "version": 1,
        "equal": found.equal,
        "layouts": list(found.layouts),
        "num_equal": found.num_equal,
        "num_moved": found.num_moved,
        "num_resliced": found.num_resliced,
        "differences": [{**asdict(one), "relative": one.relative} for one in found.differences],
    }


def diff_text(found: DiffResult) -> str:
    a, b = found.layouts
    lines = [f"layout: {a}"] if a == b else [f"layout of A: {a}", f"layout of B: {b}"]
    moved = f" ({found.num_moved} on another stage)" if found.num_moved else ""
    sliced = f", {found.num_resliced} are equal but sliced differently" if found.num_resliced else ""
    lines.append(f"{found.num_equal} tensors are equal{moved}{sliced}, {len(found.differences)} differ")
    return "\n".join([*lines, *map(_line, found.differences)])


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
        "problems": [
            {
                "code": each.code,
                "where": each.where,
                "problem": each.problem,
                "hint": each.hint,
                "names": list(each.names),
            }
            for each in done.findings
        ],
    }


def check_text(done: CheckResult) -> str:
    """Return one line for each problem, and the verdict last, where a log ends."""
    lines = []
    for each in done.findings:
        lines.append(f"{each.where}: {each.problem} [{each.code}]")
        if each.hint:
            lines.append(f"  hint: {each.hint}")
    files = "1 file" if done.num_files == 1 else f"{done.num_files} files"
    what = f"{done.num_tensors} tensors in {files}, {show_bytes(done.nbytes)}"
    read = f"{show_bytes(done.read_nbytes)} of data read" if done.read_nbytes else "headers only, no data read"
    if done.ok:
        wrote = "; wrote digests.json" if done.wrote_digests else ""
        lines.append(f"ok: {done.location}: no problem found ({what}; {read}){wrote}")
    else:
        count = "1 problem" if len(done.findings) == 1 else f"{len(done.findings)} problems"
        lines.append(f"FAILED: {done.location}: {count} found ({what}; {read})")
    return "\n".join(printable(line, lines=False) for line in lines)
