"""A dump of one training step: its tokens, its loss, and the gradient of every parameter (docs/my-loss-differs.md)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from manifests.errors import SourceError
from manifests.jsontext import parse_json_object
from manifests.safetensors import read_header
from manifests.store import read_small_file
from runner.data.rows import IGNORED

TOKENS, STEP, GRADIENTS = "tokens.safetensors", "step.json", "gradients*.safetensors"
DTYPES: Mapping[str, torch.dtype] = {"float32": torch.float32, "bfloat16": torch.bfloat16}
_STORED = ("F64", "F32", "BF16")
_FIELDS = {"loss": float, "grad_norm": float, "dtype": str, "reduction": str}
_OF_ROWS = ("input_ids", "labels")
_OPTIONAL = ("position_ids", "document_ids")
_PAGE = "docs/my-loss-differs.md describes the files of a dump"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Rows:
    """The batch of a step. Shapes: all (B, L), int64; labels are the next tokens, or IGNORED."""

    tokens: torch.Tensor
    labels: torch.Tensor
    position_ids: torch.Tensor | None = None
    document_places: torch.Tensor | None = None  # of each token in its document: 0 where one begins

    @property
    def num_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Dump:
    """A dump whose small files have been read; gradients are read from `files`, by tensor name, one by one."""

    rows: Rows
    loss: float
    grad_norm: float
    dtype: torch.dtype
    files: Mapping[str, Path]

    def gradient(self, name: str) -> torch.Tensor:
        with safe_open(self.files[name], "pt") as file:
            tensor: torch.Tensor = file.get_tensor(name)
        return tensor.float()


def read_dump(folder: Path) -> Dump:
    """Read the tokens and the losses of a dump, and the headers of its gradients."""
    step = _read_step(folder / STEP)
    return Dump(
        rows=_read_rows(folder / TOKENS),
        loss=step["loss"],
        grad_norm=step["grad_norm"],
        dtype=DTYPES[step["dtype"]],
        files=dict(_locate(folder)),
    )


def _read_step(path: Path) -> dict[str, Any]:
    step = parse_json_object(read_small_file(path), str(path))
    if wrong := sorted(step.keys() ^ _FIELDS.keys()):
        raise refused(path, f"expected the fields {', '.join(_FIELDS)}, found {', '.join(step)}", wrong[0])
    for name, kind in _FIELDS.items():
        if not isinstance(step[name], kind) and not (kind is float and type(step[name]) is int):
            raise refused(path, f"expected {'a number' if kind is float else 'text'}, found {step[name]!r}", name)
    for name, allowed in (("dtype", tuple(DTYPES)), ("reduction", ("mean",))):
        if step[name] not in allowed:
            raise refused(path, f"expected {' or '.join(allowed)}, found {step[name]!r}", name)
    return step


def _read_rows(path: Path) -> Rows:
    header = read_header(path)
    kinds = {entry.name: (entry.dtype, entry.shape) for entry in header.tensors}
    if wrong := sorted(kinds.keys() - {*_OF_ROWS, *_OPTIONAL} | {*_OF_ROWS} - kinds.keys()):
        expected = f"{', '.join(_OF_ROWS)}, and perhaps {', '.join(_OPTIONAL)}"
        raise refused(path, f"expected {expected}, found {', '.join(kinds)}", wrong[0])
    shape = kinds[_OF_ROWS[0]][1]
    for name, kind in kinds.items():
        if len(shape) != 2 or kind != ("I64", shape):
            raise refused(path, f"expected int64 [rows, seq-len], found {kind[0]} {list(kind[1])}", name)
    with safe_open(path, "pt") as file:
        rows = {name: file.get_tensor(name) for name in kinds}
    tokens, labels, documents = rows["input_ids"], rows["labels"], rows.get("document_ids")
    counted = labels != IGNORED
    if not counted.any() or labels[counted].min() < 0 or not tokens.numel() or tokens.min() < 0:
        raise refused(path, f"expected tokens, and labels that are tokens or {IGNORED}")
    if torch.equal(tokens[counted], labels[counted]):
        raise refused(path, "labels are the tokens themselves, expected the one that follows each, shifted by one")
    return Rows(
        tokens=tokens,
        labels=labels,
        position_ids=rows.get("position_ids"),
        document_places=None if documents is None else _places_in(documents),
    )


def _places_in(documents: torch.Tensor) -> torch.Tensor:
    """Return the positions of tokens in their documents, each of which is contiguous."""
    places = torch.arange(documents.shape[1]).expand_as(documents)
    begins = torch.ones_like(documents, dtype=torch.bool)
    begins[:, 1:] = documents[:, 1:] != documents[:, :-1]
    return places - torch.where(begins, places, 0).cummax(1).values


def _locate(folder: Path) -> Iterator[tuple[str, Path]]:
    """Yield the name of each gradient, and its file."""
    names: set[str] = set()
    for path in sorted(folder.glob(GRADIENTS)):
        for entry in read_header(path).tensors:
            if entry.dtype not in _STORED:
                raise refused(path, f"expected {', '.join(_STORED)}, found {entry.dtype}", repr(entry.name))
            if entry.name in names:
                raise refused(path, "another file has it too, expected it once, and whole", repr(entry.name))
            names.add(entry.name)
            yield entry.name, path
    if not names:
        raise refused(folder / GRADIENTS, "expected the gradients of a step, found none")


def refused(path: Path, problem: str, field: str = "") -> SourceError:
    return SourceError(f"{path}: {field}" if field else str(path), problem, _PAGE, code="source.bad-dump")
