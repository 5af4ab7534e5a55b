"""Compare a dump of somebody's training step (docs/my-loss-differs.md) with transformers' model in one process.

# Note [Tolerances of dumps]
A gradient may differ, in its largest element, by 1e-5 of the largest in the tensor; one that is nothing but rounding,
such as that of a bias of keys, by 1e-5 of a thousandth of the largest of all. Of a dump in bfloat16 it is 2^-8, one
rounding, or twice what transformers' own model in bfloat16 differs from the reference, which is float32 for both.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import nn

from manifests.errors import SourceError
from manifests.jsontext import parse_json_object
from manifests.safetensors import read_header
from manifests.store import read_small_file
from runner.data.rows import IGNORED
from runner.models.document_mask import documents_at, mask_rows
from runner.models.whole_model import ParameterGradient, name_gradients, no_reference, read_whole
from runner.pipeline.microbatches import token_loss
from runner.training.gradient_norm import sum_squares

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
    documents: torch.Tensor | None = None  # equal within each document; None: each row is one

    @property
    def num_tokens(self) -> int:
        return int((self.labels != IGNORED).sum())

    def documents_of(self, row: int) -> Iterator[slice]:
        """Yield the places of each document of a row."""
        begins = [0, self.tokens.shape[1]]
        if self.documents is not None:
            document = self.documents[row]
            begins[1:1] = ((document[1:] != document[:-1]).nonzero().flatten() + 1).tolist()
        yield from (slice(*ends) for ends in pairwise(begins))


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
    tokens, labels = rows["input_ids"], rows["labels"]
    counted = labels != IGNORED
    if not counted.any() or labels[counted].min() < 0 or not tokens.numel() or tokens.min() < 0:
        raise refused(path, f"expected tokens, and labels that are tokens or {IGNORED}")
    if torch.equal(tokens[counted], labels[counted]):
        raise refused(path, "labels are the tokens themselves, expected the one that follows each, shifted by one")
    return Rows(
        tokens=tokens,
        labels=labels,
        position_ids=rows.get("position_ids"),
        documents=rows.get("document_ids"),
    )


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


_TOLERANCES: Mapping[torch.dtype, float] = {torch.float32: 1e-5, torch.bfloat16: 2.0**-8}
_NORM, _OF_LARGEST = 1e-4, 1e-3  # see Note [Tolerances of dumps]


@dataclass(frozen=True, kw_only=True, slots=True)
class Difference:
    """The loss, the norm, or a gradient of a dump, which is not as in one process; None where there is no number."""

    name: str
    problem: str
    difference: float | None = None  # of the largest element, relative to the largest; at most `allowed`
    allowed: float | None = None
    factor: float | None = None  # what that of one process is best multiplied by


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """How a dump compares with one process: gradients from the loss back to the embedding."""

    loss: float
    grad_norm: float
    num_tensors: int
    largest: float  # difference of a gradient that is equal
    differences: tuple[Difference, ...]

    @property
    def factor(self) -> float | None:
        """What all gradients are multiplied by, if nothing else is wrong with them."""
        wrong = [difference for difference in self.differences if difference.name not in ("loss", "grad_norm")]
        factors = [difference.factor for difference in wrong if difference.factor is not None]
        if not wrong or len(factors) < max(self.num_tensors, len(wrong)):
            return None
        return factors[0] if all(math.isclose(factor, factors[0], rel_tol=1e-3) for factor in factors) else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Step:
    loss: float
    norm: float
    gradients: tuple[ParameterGradient, ...]


def compare_dump(dump: Dump, model: Path, device: torch.device, tolerance: float | None) -> Compared:
    """Compare a dump with the model of a folder, which is run in this process; see Note [Tolerances of dumps]."""
    of_norm = max(_NORM, _TOLERANCES[dump.dtype]) if tolerance is None else tolerance
    of_rounding = 2 if tolerance is None else 0  # times what the step in the dtype of the dump differs
    tolerance = _TOLERANCES[dump.dtype] if tolerance is None else tolerance
    exact = _run(model, dump.rows, torch.float32, device)
    rounded = exact if of_rounding == 0 or dump.dtype == torch.float32 else _run(model, dump.rows, dump.dtype, device)
    differences, names, most = [], set[str](), 0.0
    for name, given, expected, own, least in (
        ("loss", dump.loss, exact.loss, rounded.loss, tolerance),
        ("grad_norm", dump.grad_norm, exact.norm, rounded.norm, of_norm),
    ):
        scale = max(abs(expected), 1e-30)
        difference, allowed = abs(given - expected) / scale, max(least, of_rounding * abs(own - expected) / scale)
        if difference > allowed:
            problem = f"{given:.7g}, expected {expected:.7g}: {difference:.1e} off, at most {allowed:.1e}"
            differences.append(Difference(name=name, problem=problem, difference=difference, allowed=allowed))
    overall = max(_largest(parameter.gradient) for parameter in exact.gradients)
    for name, wanted, other in _pairs(exact.gradients, rounded.gradients, dump.files):
        if name not in dump.files:
            if wanted.any():  # an expert without tokens may have no gradient
                differences.append(Difference(name=name, problem="is missing"))
            continue
        names.add(name)
        gradient = dump.gradient(name).to(device)
        if gradient.shape != wanted.shape:
            problem = f"expected {list(wanted.shape)}, found {list(gradient.shape)}"
            differences.append(Difference(name=name, problem=problem))
            continue
        scale = max(_largest(wanted), _OF_LARGEST * overall, 1e-30)
        difference = _largest(gradient - wanted) / scale
        allowed = max(tolerance, of_rounding * _largest(other - wanted) / scale)
        if difference <= allowed:
            most = max(most, difference)
            continue
        factor = ((gradient.double() * wanted).sum() / wanted.double().square().sum().clamp_min(1e-300)).item()
        problem = f"{difference:.1e} of its largest element off, at most {allowed:.1e}; {factor:.4g} times the expected"
        numbers = {"difference": difference, "allowed": allowed, "factor": factor}
        finite = {key: number for key, number in numbers.items() if math.isfinite(number)}
        differences.append(Difference(name=name, problem=problem, **finite))
    unexpected = [Difference(name=name, problem="is not of the model") for name in dump.files if name not in names]
    return Compared(
        loss=exact.loss,
        grad_norm=exact.norm,
        num_tensors=len(names),
        largest=most,
        differences=(*unexpected, *differences),
    )


def _pairs(
    exact: Sequence[ParameterGradient], rounded: Sequence[ParameterGradient], names: Mapping[str, Path]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield each tensor of both runs, by the names that the dump has for its parameter, or else by those of files."""
    for parameter, other in zip(exact, rounded, strict=True):
        pairs = list(zip(parameter.names, other.names, strict=True))
        present = [pair for pair in pairs if not pair[0].keys().isdisjoint(names)]
        for tensors, others in present or pairs[:1]:
            for name, tensor in tensors.items():
                yield name, tensor, others[name]


def _run(folder: Path, rows: Rows, dtype: torch.dtype, device: torch.device) -> _Step:
    model = read_whole(folder, dtype, device)
    vocab_size = model.get_input_embeddings().weight.shape[0]  # type: ignore[index]
    if (highest := max(rows.tokens.max().item(), rows.labels.max().item())) >= vocab_size:
        raise refused(Path(TOKENS), f"expected tokens below the model's {vocab_size}, found {highest}")
    try:
        loss, gradients = run_rows(model, rows, device)
    except Exception as error:  # such as of rows that are longer than its table of positions
        raise no_reference(str(folder), error, "check that its rows are not longer than the model takes") from error
    norm = math.sqrt(math.fsum(sum_squares(list(gradients.values())).tolist()))
    return _Step(loss=loss, norm=norm, gradients=tuple(name_gradients(model, gradients)))


def run_rows(model: nn.Module, rows: Rows, device: torch.device) -> tuple[float, dict[nn.Parameter, torch.Tensor]]:
    """Return the mean loss over all labels, and its gradients, summed in float32.

    Each document is computed by itself: no mask keeps documents apart in convolutions and linear attention.
    """
    if rows.position_ids is not None:
        mask_rows(model, None)
    losses = []
    places = ((number, part) for number in range(len(rows.tokens)) for part in rows.documents_of(number))
    with _summed_gradients(model) as gradients:
        for row, part in places:
            tokens, labels, positions = (
                None if tensor is None else tensor[row : row + 1, part].to(device)
                for tensor in (rows.tokens, rows.labels, rows.position_ids)
            )
            assert labels is not None
            inputs = {}
            if positions is not None:  # the mask keeps transformers from taking positions that restart for documents
                inputs = {"position_ids": positions, "attention_mask": torch.ones_like(positions)}
            with documents_at(None):
                logits = model(input_ids=tokens, use_cache=False, **inputs).logits
            loss = token_loss(logits, labels, num_tokens=rows.num_tokens)
            torch.autograd.backward(loss)
            losses.append(loss.item())
    return math.fsum(losses), gradients


@contextmanager
def _summed_gradients(model: nn.Module) -> Iterator[dict[nn.Parameter, torch.Tensor]]:
    """Sum the gradients of the block in float32, instead of in the parameters."""
    gradients: dict[nn.Parameter, torch.Tensor] = {}

    def add(parameter: nn.Parameter) -> None:
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad, None
        if parameter in gradients:
            gradients[parameter] += gradient
        else:
            gradients[parameter] = gradient.float()

    hooks = [parameter.register_post_accumulate_grad_hook(add) for parameter in model.parameters()]  # type: ignore[no-untyped-call]
    try:
        yield gradients
    finally:
        # The garbage collector does not see the cycle of a parameter, its hook and the gradients by parameter.
        for hook in hooks:
            hook.remove()


def _largest(tensor: torch.Tensor) -> float:
    """Return the largest magnitude; infinity where there is no number."""
    largest: float = tensor.abs().nan_to_num(torch.inf, torch.inf).max().item()
    return largest
