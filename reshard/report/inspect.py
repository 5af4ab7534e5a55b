"""The output of `reshard inspect`."""

from __future__ import annotations

from typing import Any

from manifests.codec import manifest_document
from manifests.errors import printable
from manifests.schema import Manifest
from reshard.formatting import show_bytes, show_numbers
from reshard.layout.model import compress_modules
from reshard.report.text import table, tie_lines
from stores.bundles import Bundles, TensorAt
from stores.manifest_file import Address, ManifestFile, find_manifest_file

__all__ = ["inspect_json", "inspect_text"]


def inspect_text(address: Address, with_tensors: bool) -> str:
    file = find_manifest_file(address)
    manifest, _ = file.read()
    layout = manifest.layout
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
    head = ("stage", "rank", "virtual", "modules", "tensors", "params", "bytes")
    training = manifest.training
    lines = [
        f"{manifest.model.architecture}, {manifest.model.num_layers} layers, {manifest.model.num_params:,} parameters",
        f"from {manifest.source.kind}: {manifest.source.location}",
        f"written by {manifest.created_by}"
        + (f" after step {training.step}, {training.num_tokens:,} tokens" if training else "")
        + (f", with the optimizer state of {training.optimizer.name}" if training and training.optimizer else ""),
        f"layout {layout.spec}: {layout.num_stages} stages on {layout.num_ranks} ranks, style {layout.style}",
        table(head, rows, left=frozenset({"modules"})),
        *tie_lines(manifest.ties),
        *_virtual_lines(manifest),
        "files: " + ", ".join(file.path for file in manifest.files),
    ]
    if with_tensors:
        tensors = [
            (str(stage), tensor.name, tensor.dtype, _shape(tensor), tensor.digest or "")
            for stage, tensor in _tensors(manifest, file)
        ]
        columns = ("stage", "tensor", "dtype", "shape", "blake3")
        lines.append(table(columns, tensors, left=frozenset(columns[1:])))
    return printable("\n".join(lines))


def inspect_json(address: Address, with_tensors: bool) -> dict[str, Any]:
    file = find_manifest_file(address)
    manifest, _ = file.read()
    found: dict[str, Any] = {"version": 1, "manifest": manifest_document(manifest)}
    if with_tensors:
        found["tensors"] = [
            {
                "stage": stage,
                "fqn": tensor.name,
                "dtype": tensor.dtype,
                "shape": list(tensor.shape),
                "offset": list(tensor.offset),
                "whole_shape": list(tensor.whole_shape),
                "nbytes": tensor.nbytes,
                "blake3": tensor.digest,
            }
            for stage, tensor in _tensors(manifest, file)
        ]
    return found


def _tensors(manifest: Manifest, file: ManifestFile) -> list[tuple[int, TensorAt]]:
    bundles = Bundles(manifest, file.folder)
    bundles.read_ahead(manifest.stages)
    return [(stage.index, tensor) for stage in manifest.stages for tensor in bundles.tensors_on(stage)]


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
