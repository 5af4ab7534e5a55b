"""What the verbs that move or read bytes say when they are done."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

from manifests.invariants import MANIFEST_NAME
from manifests.schema import Manifest
from reshard.casting import Dtype
from reshard.export import ExportReport
from reshard.shares import Part
from reshard.units import show_bytes
from reshard.verify import VerifyReport
from stores.address import is_url
from stores.manifest_file import Address

__all__ = [
    "export_json",
    "export_text",
    "pack_json",
    "pack_text",
    "part_json",
    "part_text",
    "verify_json",
    "verify_text",
]


def pack_json(manifest: Manifest, out: Address) -> dict[str, Any]:
    return {
        "version": 1,
        "manifest": str(out / MANIFEST_NAME if isinstance(out, Path) else f"{out.rstrip('/')}/{MANIFEST_NAME}"),
        "num_stages": manifest.layout.num_stages,
        "num_ranks": manifest.layout.num_ranks,
        "num_tensors": sum(stage.num_tensors for stage in manifest.stages),
        "nbytes": sum(shard.nbytes for shard in manifest.shards),
        "virtual_nbytes": sum(stage.nbytes for stage in manifest.stages if stage.spans),
    }


def pack_text(manifest: Manifest, out: Address) -> str:
    done = pack_json(manifest, out)
    packed, virtual = show_bytes(done["nbytes"]), show_bytes(done["virtual_nbytes"])
    how = f"{packed}, and left {virtual} where they are" if manifest.virtual else packed
    place = shlex.quote(done["manifest"])
    fetch, place = (f"reshard pack {place} --out DIR; ", "DIR") if is_url(out) else ("", place)
    stages = "1 stage" if done["num_stages"] == 1 else f"{done['num_stages']} stages"
    moments = " and their moments" if manifest.training and manifest.training.optimizer else ""
    return (
        f"packed {done['num_tensors']} tensors{moments}, {how}, in {stages}: {done['manifest']}\n"
        f"next: {fetch}runner launch {place} --nproc-per-node {done['num_ranks']} -- --help"
    )


def part_json(part: Part, nbytes: int) -> dict[str, Any]:
    return {"version": 1, "part": part.number, "of": part.of, "nbytes": nbytes}


def part_text(part: Part, nbytes: int, out: Address) -> str:
    return f"packed part {part.number} of {part.of}: {show_bytes(nbytes)}\nnext, after all parts: reshard commit {out}"


def export_json(done: ExportReport, form: str, out: Address) -> dict[str, Any]:
    return {
        "version": 1,
        "out": str(out),
        "format": form,
        "num_files": done.num_files,
        "nbytes": done.nbytes,
        "same_headers": done.identical,
        "casts": [{"from": before, "to": after, "num_tensors": num} for (before, after), num in done.casts.items()],
    }


def export_text(done: ExportReport, dtype: Dtype, out: Address) -> str:
    how = "headers as in the source" if done.identical else "new headers: dtypes or tensors differ from the source"
    lines = [f"exported {done.num_files} files, {show_bytes(done.nbytes)} of weights ({how}): {out}"]
    why = ", as in the source; --dtype fp32 keeps every bit" if dtype == "source" else ""
    lines += [f"cast {num} tensors from {before} to {after}{why}" for (before, after), num in done.casts.items()]
    return "\n".join(lines)


def verify_json(done: VerifyReport) -> dict[str, Any]:
    return {
        "version": 1,
        "equal": not done.differences,
        "num_tensors": done.num_tensors,
        "nbytes": done.nbytes,
        "compared_nbytes": done.compared_nbytes,
        "differences": [{"where": where, "problem": problem} for where, problem in done.differences],
    }


def verify_text(done: VerifyReport, manifest: str) -> str:
    read = f"{done.num_tensors} tensors, {show_bytes(done.nbytes)}"
    unread = done.nbytes - done.compared_nbytes
    if not done.differences and done.source and done.num_beyond:
        which = f"{done.num_tensors - done.num_beyond} weights are as in {done.source}"
        return f"verified {read}: {which}; it has none of the {done.num_beyond} moments"
    if not done.differences and done.source:
        return f"verified {read}: every tensor is as in {done.source}"
    if not done.differences and unread:
        same = "sizes, headers and pins are as the manifest says"
        return f"looked at {read}: {same}; {show_bytes(unread)} of data were not compared"
    if not done.differences:
        return f"verified {read}: every digest is as the manifest says"
    lines = [f"{manifest}: {len(done.differences)} differ, of {read}"]
    lines += [f"  {where}: {problem}" for where, problem in done.differences]
    hint = () if done.source else ("hint: copy the files that differ once more, or write the checkpoint again",)
    return "\n".join((*lines, *hint))
