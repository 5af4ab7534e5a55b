"""What is wrong with a Hugging Face folder: index and files, config against tensors, tokenizer against embedding."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice

from manifests.errors import ModelError, SourceError, UserError
from manifests.index import ADAPTER_NAMES
from manifests.jsontext import parse_json_object
from manifests.models import ModelShape, check_readable, is_sized_by_files, model_shape
from manifests.models.adapters import PEFT_CONFIG
from manifests.models.config import CONFIG_NAME, says_tied
from manifests.schema import ModelDescription
from reshard.copy.engine import hash_tensors
from reshard.copy.runs import ByteCounter
from reshard.formats.auxiliary import adapter_error
from reshard.formats.huggingface.check_files import Weights, read_files
from reshard.formats.huggingface.read import no_config
from reshard.formats.table import CheckOptions
from reshard.formatting import count_of, find_missing, some
from reshard.tensors.comparison import Contents, Findings, compare_with_shape, stored_in, without_absent
from reshard.transforms.casts import have_equal_samples
from stores.base import Folder, read_config, read_whole
from stores.bundles import TensorAt

TOKENIZER_NAME = "tokenizer.json"

_NUMBER = re.compile(r"(?:^|(?<=\.))[0-9]{1,9}(?=\.)")  # a layer's or an expert's number in a tensor's name
_MOST_NUMBERS = 4  # that are looked at in one name: two are common
_LAYERS = re.compile(r"(^|\.)(layers|h|blocks)\.\*$")
_PLACEHOLDER = re.compile("image|audio|video")  # in whose place the output of a tower goes: it needs no row
_EMBEDDING = re.compile(r"(^|.*\.)(embed_tokens|wte|word_embeddings|tok_embeddings|embed_in)\.weight")


def check(folder: Folder, findings: Findings, options: CheckOptions) -> Contents:
    """Report what is wrong with a folder: index, files and headers, and what config and tokenizer say of them."""
    files = folder.names()
    if CONFIG_NAME not in files and PEFT_CONFIG in files:
        raise no_config(folder, files)
    weights = read_files(folder, findings)
    _check_model(folder, weights, findings, options.progress, options.description)
    return weights.contents


def read_weights(folder: Folder) -> Mapping[str, TensorAt]:
    """Return the tensors of all files that can be read."""
    findings = Findings()
    weights = read_files(folder, findings)
    if not weights.tensors:
        first = next(iter(findings))
        raise SourceError(first.where, first.problem, first.hint, code="source.nothing-to-compare")
    return weights.tensors


def _check_model(
    folder: Folder,
    weights: Weights,
    findings: Findings,
    progress: ByteCounter,
    description: ModelDescription | None,
) -> None:
    """Compare config.json and tokenizer.json with the tensors, whose bytes are read only where copies are tied."""
    files = folder.names()
    for name in ADAPTER_NAMES:
        if name in files:
            findings.add_error(adapter_error(str(folder.file(name))))
    if CONFIG_NAME not in files:
        where, hint = f"{folder}/{CONFIG_NAME}", "download it: no reader opens the weights without it"
        findings.add(where, "no such file", hint, code="check.no-config")
        _report_gaps(folder, weights, {}, findings)
        return
    file = folder.file(CONFIG_NAME)
    try:
        config = read_config(file)
        check_readable(config, str(file))
        shape = _shape_of(folder, config, weights, description)
    except UserError as error:
        findings.add_error(error)
        return
    if weights.is_whole:
        if shape is None:
            _report_gaps(folder, weights, config, findings)
        else:
            _report_coverage(folder, weights, shape, findings)
    if shape is not None:
        is_default = not says_tied(config) and description is None
        _report_ties(weights, shape, findings, progress, is_default=is_default)
    if TOKENIZER_NAME in files:
        _report_vocabulary(folder, weights, findings)


def _shape_of(
    folder: Folder, config: Mapping[str, object], weights: Weights, description: ModelDescription | None
) -> ModelShape | None:
    """Return the shape of a model whose architecture is known; None for another, or where a file cannot be read."""
    where = str(folder.file(CONFIG_NAME))
    try:
        needs_files = is_sized_by_files(config, where, description)
    except ModelError:
        if description is not None:
            raise
        return None
    if needs_files and not weights.is_whole:
        return None
    return model_shape(config, where, stored_in(weights.tensors, str(folder)), description)


def _report_coverage(folder: Folder, weights: Weights, shape: ModelShape, findings: Findings) -> None:
    """Report what is missing, unknown or of another shape, as the architecture has it."""
    tensors = {shape.fqn_of(name): tensor for name, tensor in weights.tensors.items()}
    for name, tensor in weights.tensors.items():
        if (other := tensors[shape.fqn_of(name)]) is not tensor:
            problem, hint = (
                f"is the same tensor of the model as {other.name!r} in {other.file}",
                "remove one of the two",
            )
            findings.add(f"{tensor.file}: {name!r}", problem, hint, code="check.tensor-twice")
    shape = without_absent(shape, tensors)
    coverage = compare_with_shape(tensors, shape)
    if missing := coverage.missing:
        findings.add(
            folder,
            f"{len(missing)} of {len(shape.tensors)} tensors of the model missing: {some(missing)}",
            "the checkpoint is incomplete; download or save it again",
            missing,
            code="source.missing-tensor",
        )
    if unknown := coverage.unexpected:
        findings.add(
            folder,
            f"{count_of(unknown, 'tensor')} that {shape.architecture} does not have: {some(unknown)}",
            "weights and config disagree; download both from one revision",
            unknown,
            code="source.unknown-tensor",
        )
    if wrong := coverage.different:
        tensor = tensors[wrong[0]]
        problem = f"expected {list(shape.tensors[wrong[0]])} ({CONFIG_NAME}), found {list(tensor.shape)}"
        findings.add(
            f"{tensor.place}.shape",
            problem + (f"; and {count_of(wrong, 'tensor')} in all" if len(wrong) > 1 else ""),
            "weights and config disagree; download both from one revision",
            wrong,
            code="source.shape-mismatch",
        )


def _report_gaps(folder: Folder, weights: Weights, config: Mapping[str, object], findings: Findings) -> None:
    """Report gaps in numbered layers and experts, of a model of which nothing else is known."""
    for where, numbers in _numbered(weights.tensors):
        count, missing = find_missing(numbers, range(max(numbers) + 1))
        if missing:
            names = [where.removesuffix("*") + str(number) for number in missing]
            problem = f"numbers 0 to {max(numbers)} are in use, and {count} missing: {some(names)}"
            hint = "the checkpoint is incomplete; download or save it again"
            findings.add(folder, problem, hint, names, code="check.missing-layer")
    expected = config.get("num_hidden_layers")
    num_layers = max(
        (max(numbers) + 1 for where, numbers in _numbered(weights.tensors) if _LAYERS.search(where)), default=0
    )
    if type(expected) is int and 0 < num_layers < expected:
        problem = f"expected {expected} layers (num_hidden_layers), found {num_layers}"
        hint = "the checkpoint is incomplete, or config.json is of another model"
        findings.add(folder, problem, hint, code="check.missing-layer")


def _numbered(names: Mapping[str, object]) -> Iterator[tuple[str, set[int]]]:
    """Yield each place where names are numbered, as `model.layers.*`, with the numbers there."""
    places: dict[str, set[int]] = {}
    for name in names:
        for match in islice(_NUMBER.finditer(name), _MOST_NUMBERS):
            places.setdefault(name[: match.start()] + "*", set()).add(int(match[0]))
    yield from sorted(places.items())


def _report_ties(
    weights: Weights, shape: ModelShape, findings: Findings, progress: ByteCounter, *, is_default: bool
) -> None:
    """Report tied weights that are stored several times with different bytes.

    What a class ties by default is two weights if samples differ, as when a folder is opened (docs/adr/0051).
    """
    tensors = {shape.fqn_of(name): tensor for name, tensor in weights.tensors.items()}
    for group in shape.ties:
        stored = [tensors[fqn] for fqn in group if fqn in tensors]
        places = {(tensor.file, tensor.begin) for tensor in stored}  # one, of names that torch.save wrote
        if len({(tensor.dtype, tensor.shape) for tensor in stored}) != 1 or len(places) < 2:
            continue  # one copy, or shapes that were reported
        first, *others = stored
        try:
            if is_default and not all(have_equal_samples(first, other, first.dtype, progress) for other in others):
                continue
            digests = hash_tensors([replace(tensor, blake3=None) for tensor in stored], progress)
        except (UserError, OSError):
            continue  # damage is reported where the file is read
        if len(set(digests)) > 1:
            authority = shape.architecture if is_default else CONFIG_NAME
            findings.add(
                others[0].place,
                f"is tied to {first.name} by {authority}, and is stored with other values",
                "set tie_word_embeddings to false if the two are meant to differ; else save the model again",
                code="check.tied-copy",
            )


def _report_vocabulary(folder: Folder, weights: Weights, findings: Findings) -> None:
    """Report a tokenizer that has more tokens than the embedding has rows."""
    file = folder.file(TOKENIZER_NAME)
    try:
        document = parse_json_object(read_whole(file), str(file))
    except UserError as error:
        if error.code != "source.too-many-values":  # the largest vocabularies have that many
            findings.add_error(error)
        return
    largest = max(_token_ids(document), default=-1)
    rows = _embedding_rows(weights.tensors)
    if rows is not None and largest >= rows[1]:
        findings.add(
            file,
            f"has token {largest}, and {rows[0]} has {rows[1]} rows",
            "tokenizer and weights are of different models or versions; download both again",
            code="check.vocabulary",
        )


def _token_ids(document: Mapping[str, object]) -> Iterator[int]:
    model, added = document.get("model"), document.get("added_tokens")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from (number for number in vocabulary.values() if type(number) is int)
    elif isinstance(vocabulary, list):
        yield len(vocabulary) - 1
    for token in added if isinstance(added, list) else ():
        if not isinstance(token, dict) or _PLACEHOLDER.search(str(token.get("content"))):
            continue
        if type(token.get("id")) is int:
            yield token["id"]


def _embedding_rows(tensors: Mapping[str, TensorAt]) -> tuple[str, int] | None:
    embeddings: Sequence[TensorAt] = [tensor for name, tensor in tensors.items() if _EMBEDDING.fullmatch(name)]
    shapes = [(tensor.name, tensor.shape[0]) for tensor in embeddings if len(tensor.shape) == 2]
    return shapes[0] if len(shapes) == 1 else None
