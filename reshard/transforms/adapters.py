"""Adding adapters to a checkpoint's weights when these are read: a plan entry for each weight that has one.

# Note [Merged weights]
A merged weight is W + sum of weight x scale x B A, each value computed in float64 and rounded once to the dtype of W.
peft rounds the product to that dtype, and then the sum, so in 16 bits its last bit may differ. Tensors that no adapter
touches keep their bytes. A quantized weight is dequantized, merged in the dtype that its encoder takes, and quantized
as it was: see Note [Encoders].
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache, partial

from manifests.digest import Hasher
from manifests.errors import Parameter, SourceError, UsageError
from manifests.models.adapters import (
    BASE_DIGEST,
    BASE_TENSORS,
    LORA_A,
    LORA_B,
    PEFT_CONFIG,
    PEFT_PREFIX,
    PEFT_WEIGHTS,
    BaseTensor,
    PeftConfig,
    digest_of_base,
    digest_of_ranges,
    matches_target,
    parse_base,
    parse_peft_config,
)
from manifests.models.shape import ModelShape
from reshard.tensors.checkpoint import Checkpoint
from reshard.tensors.lazy import (
    OTHER_ADAPTER,
    STEP_NBYTES,
    BlockReader,
    Buffer,
    derive,
    have_equal_bytes,
    read_blocks,
    stored_origins,
)
from reshard.transforms.casts import FLOATS, cast_tensor
from reshard.transforms.quantize import SECTION, find_plain, quantize_weight, scale_of
from reshard.transforms.terms import Term
from stores.base import InputFile, check_whole, read_file_header, read_whole
from stores.bundles import TensorAt, tensors_in
from stores.open import open_store

logger = logging.getLogger(__name__)

# Beginnings of the names of a tokenizer's files, and of a chat template's.
_OF_TOKENIZER = ("tokenizer", "special_tokens_map.", "added_tokens.", "vocab.", "merges.", "spiece.", "chat_template")
# Experts in one tensor, in the order in which peft wraps their module, and the matrices of an expert in files.
_FUSED: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")),
    "down_proj": (("down_proj",), ("w2",)),
}
_TRANSPOSED = ("GptOssForCausalLM", "OpenAIPrivacyFilterForTokenClassification", "AriaForConditionalGeneration")
_CONV1D = ("GPT2LMHeadModel", "OpenAIGPTLMHeadModel")  # peft goes by the module, whatever fan_in_fan_out says
_EXPERTS_IN_FILES = (("", ""), (".mlp.experts", ".block_sparse_moe.experts"))
_INSIDE = ".base_layer"
_BY_PEFT = "merge it with peft's merge_and_unload"


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """The LoRA adapter of a PEFT folder: its tensors by the name of the module, as B's and A's."""

    location: str
    config: PeftConfig
    pairs: Mapping[str, tuple[TensorAt, TensorAt]]
    saved: Mapping[str, TensorAt]  # of modules that are replaced as a whole
    bases: Mapping[str, TensorAt]  # of adapted modules, such as the head, which peft saves beside its adapter
    base_digest: str | None  # of the base that our own training used
    base_tensors: Mapping[str, BaseTensor]  # likewise
    tokenizer: Mapping[str, InputFile]  # its files and those of a chat template, by name


def open_adapter(location: str) -> Adapter:
    """Read the config and the header of a PEFT folder."""
    folder = open_store(location)
    names = folder.names()
    if lacking := [name for name in (PEFT_CONFIG, PEFT_WEIGHTS) if name not in names]:
        problem, hint = f"has no {lacking[0]}", "ADAPTER is a PEFT folder, such as runner launch --save writes"
        raise SourceError(location, problem, hint, code="source.bad-adapter")
    config = parse_peft_config(read_whole(folder.file(PEFT_CONFIG)), str(folder.file(PEFT_CONFIG)))
    file = folder.file(PEFT_WEIGHTS)
    header = read_file_header(file)
    halves: tuple[dict[str, TensorAt], dict[str, TensorAt]] = ({}, {})
    saved = {}
    for tensor in tensors_in(file, header):
        name = tensor.name.removeprefix(PEFT_PREFIX)
        half = next((half for half, suffix in enumerate((LORA_A, LORA_B)) if name.endswith(suffix)), None)
        if half is not None and tensor.dtype in FLOATS and len(tensor.shape) == 2:
            halves[half][name.removesuffix((LORA_A, LORA_B)[half])] = tensor
        elif ".lora_" in name or half is not None:
            problem = f"{name} is not a matrix of an adapter of linear modules or experts"
            raise SourceError(str(file), problem, _BY_PEFT, code="source.adapter-kind")
        else:
            saved[name.replace(".modules_to_save", "")] = tensor
    a, b = halves
    inside = [name for name in saved if name.rpartition(f"{_INSIDE}.")[0] in a]
    bases = {name.replace(_INSIDE, ""): saved.pop(name) for name in inside}
    if odd := sorted(a.keys() ^ b.keys()):
        raise SourceError(str(file), f"has one of the two matrices of {odd[0]}", code="source.bad-adapter")
    if not a and not saved:
        raise SourceError(str(file), "has no adapters", code="source.bad-adapter")
    return Adapter(
        location=location,
        config=config,
        pairs={module: (a[module], b[module]) for module in sorted(a)},
        saved=saved,
        bases=bases,
        base_digest=header.metadata.get(BASE_DIGEST),
        base_tensors=parse_base(header.metadata.get(BASE_TENSORS, "{}"), f"{file}: {BASE_TENSORS}"),
        tokenizer={name: folder.file(name) for name in names if name.startswith(_OF_TOKENIZER)},
    )


def merge_adapters(checkpoint: Checkpoint, adapters: Sequence[tuple[str, float]]) -> Checkpoint:
    """Return a checkpoint with adapters added to its weights when they are read, each with a weight of its own."""
    if checkpoint.moments:
        problem = "has optimizer state, which would not be that of the merged weights"
        hint = "export its weights first: reshard export --to hf"
        raise UsageError(checkpoint.location, problem, hint, code="options.merge-training-state")
    quantization = checkpoint.read_config().get(SECTION)
    section: Mapping[str, object] = quantization if isinstance(quantization, dict) else {}
    find = cache(partial(find_plain, stored=checkpoint.tensors, section=section))
    terms: dict[str, list[Term]] = {}
    replaced: dict[str, TensorAt] = {}
    bases: dict[str, TensorAt] = {}
    for location, weight in adapters:
        if not math.isfinite(weight):
            raise UsageError(Parameter("weights"), f"expected numbers, found {weight}", code="options.invalid-value")
        adapter, touched = open_adapter(location), set[str]()
        _note_tokenizer(adapter, checkpoint)
        for module in adapter.pairs:
            for fqn, term in _terms(adapter, module, find, checkpoint.shape):
                terms.setdefault(fqn, []).append(replace(term, scale=term.scale * weight))
                touched.add(fqn)
        for fqn, tensor in adapter.saved.items():
            if fqn in replaced or weight != 1:
                problem = f"{fqn} is replaced as a whole, and so can be of one adapter alone, whose weight is 1"
                raise UsageError(location, problem, "merge it alone", code="options.conflict")
            replaced[fqn] = _replacement(adapter, tensor, checkpoint.tensors.get(fqn))
        for fqn, copy in adapter.bases.items():
            if not _is_copy(copy, find(fqn)):
                raise _other(adapter, f"has the {fqn} that it was trained with, and the model has another one")
        adapted = {fqn: base for fqn in touched if (base := find(fqn)) is not None}
        _check_base(adapter, adapted.values())
        bases |= {fqn: _compared(adapter, bases.get(fqn, base)) for fqn, base in adapted.items()}
        _check_ties(adapter, touched | adapter.saved.keys(), checkpoint)
    tensors = dict(checkpoint.tensors)
    for fqn, several in terms.items():
        if fqn in replaced:
            problem = f"{fqn} has an adapter and is replaced as a whole"
            raise UsageError(adapters[0][0], problem, "merge one adapter after the other", code="options.conflict")
        stored = tensors[fqn if fqn in tensors else f"{fqn}_blocks"]
        scale, merged = scale_of(stored, tensors), _merged(bases[fqn], several)
        pair = (merged,) if scale is None else quantize_weight(merged, stored, scale, section)
        tensors.update({tensor.name: tensor for tensor in pair})
    return replace(checkpoint, tensors={**tensors, **replaced}, originals=None)


def _note_tokenizer(adapter: Adapter, checkpoint: Checkpoint) -> None:
    """Note files of an adapter's tokenizer that are not the model's: the output has the model's."""
    present = {item.path: item.file for item in checkpoint.auxiliary}
    unread = ("vocab.", "merges.") if "tokenizer.json" in present else ()  # by a model with that file
    differing = [
        name
        for name, file in adapter.tokenizer.items()
        if not (name.startswith(unread) or _is_equal(file, present.get(name)))
    ]
    if differing:
        text = "note: the output has the model's tokenizer; if %s was trained with its own %s, copy those files"
        logger.warning(text, adapter.location, " and ".join(differing))


def _is_equal(file: InputFile, other: InputFile | None) -> bool:
    return other is not None and file.nbytes == other.nbytes and check_whole(file) == check_whole(other)


def _terms(
    adapter: Adapter, module: str, find: Callable[[str], TensorAt | None], shape: ModelShape
) -> Iterator[tuple[str, Term]]:
    """Yield what a module's adapter adds to each tensor."""
    a, b = adapter.pairs[module]
    if (weight := find(f"{module}.weight")) is not None:
        if not adapter.config.selects(module, head=shape.modules[-1]):
            problem = f"has weights of {module}, which {PEFT_CONFIG} does not select, so that peft leaves them out"
            hint = f"copy {PEFT_CONFIG} of the run that wrote these weights"
            raise SourceError(adapter.location, problem, hint, code=OTHER_ADAPTER)
        is_transposed = shape.architecture in _CONV1D and module.rpartition(".")[2].startswith("c_")
        term = Term(a=a, b=b, rank=adapter.config.rank_of(module), is_transposed=is_transposed)
        yield weight.name, _fitted(adapter, module, term, weight)
        return
    experts = module.replace(_INSIDE, "")
    names = [name for name in _FUSED if matches_target(adapter.config.parameters, f"{experts}.{name}")]
    depth = module.count(_INSIDE)
    if depth >= len(names):
        raise _other(adapter, f"adapts {module}, and the model has no {module}.weight")
    name = names[-1 - depth]
    rank = adapter.config.rank_of(f"{experts}.{name}")
    if a.shape[0] % rank:
        raise _other(adapter, f"expected rank {rank} of {experts}.{name} ({PEFT_CONFIG}), found {a.shape[0]} rows")
    term = Term(a=a, b=b, rank=rank, num_experts=a.shape[0] // rank, is_transposed=shape.architecture in _TRANSPOSED)
    for here, there in _EXPERTS_IN_FILES:
        renamed = experts.replace(here, there) if here else experts
        if (whole := find(f"{renamed}.{name}")) is not None:
            yield whole.name, _fitted(adapter, f"{experts}.{name}", term, whole)
            return
        parts = next((some for some in _FUSED[name] if find(f"{renamed}.0.{some[0]}.weight")), None)
        if parts is not None:
            if find(f"{renamed}.{term.num_experts}.{parts[0]}.weight") is not None:
                raise _other(adapter, f"adapts {term.num_experts} experts of {experts}.{name}, and the model has more")
            for fqn, of_expert in _of_experts(term, renamed, parts):
                if (matrix := find(fqn)) is None:
                    raise _other(adapter, f"adapts {experts}.{name}, and the model has no {fqn}")
                yield fqn, _fitted(adapter, f"{experts}.{name}", of_expert, matrix, num_parts=len(parts))
            return
    raise _other(adapter, f"adapts {experts}.{name}, and the model has no experts of that name")


def _of_experts(term: Term, experts: str, parts: Sequence[str]) -> Iterator[tuple[str, Term]]:
    """Yield the names of the matrices of each expert, and what is added to them."""
    rows = term.b.shape[0] // len(parts)
    for expert in range(term.num_experts):
        for number, part in enumerate(parts):
            yield (
                f"{experts}.{expert}.{part}.weight",
                replace(term, expert=expert, first=number * rows, is_transposed=False),
            )


def _fitted(adapter: Adapter, target: str, term: Term, base: TensorAt, num_parts: int = 1) -> Term:
    """Return a term with its scale."""
    if base.dtype not in FLOATS:
        problem = f"is {base.dtype}, and adapters are merged into {', '.join(sorted(FLOATS))} alone"
        hint = "dequantize it: reshard pack BASE --dequantize bf16 --adapter ADAPTER"
        raise SourceError(base.place, problem, hint, code="source.cannot-cast")
    sizes = (term.b.shape[0] // num_parts, term.a.shape[1])
    sizes = sizes[::-1] if term.is_transposed else sizes
    stack = (term.num_experts,) if len(base.shape) == 3 else ()
    if base.shape != (*stack, *sizes):
        shown = f"{list(term.b.shape)} x {list(term.a.shape)}"
        raise _other(adapter, f"adapts {target}, of which {base.name} is {list(base.shape)}, by matrices of {shown}")
    if not term.a.shape[0] == term.b.shape[1] == term.rank * term.num_experts:
        shown = f"{term.a.shape[0]} and {term.b.shape[1]}"
        raise _other(adapter, f"expected rank {term.rank} of {target} ({PEFT_CONFIG}), found {shown}")
    return replace(term, scale=adapter.config.scale_of(target, term.rank))


def _replacement(adapter: Adapter, tensor: TensorAt, base: TensorAt | None) -> TensorAt:
    name = tensor.name.removeprefix(PEFT_PREFIX).replace(".modules_to_save", "")
    if not any(f"{module}." in name for module in adapter.config.saved):  # ends of names: `norm` is each layernorm, too
        raise _other(adapter, f"has {name}, which modules_to_save of {PEFT_CONFIG} does not name")
    if base is None or base.shape != tensor.shape or not {base.dtype, tensor.dtype} <= FLOATS:
        shown = "no such tensor" if base is None else f"it as {base.dtype} {list(base.shape)}"
        raise _other(adapter, f"replaces {name} by {tensor.dtype} {list(tensor.shape)}, and the model has {shown}")
    return cast_tensor(replace(tensor, name=name), base.dtype)


def _is_copy(copy: TensorAt, base: TensorAt | None) -> bool:
    """Return whether a tensor is a model's own, perhaps in the dtype that an adapter was trained with."""
    if base is None or not {base.dtype, copy.dtype} <= FLOATS:
        return False
    return have_equal_bytes(cast_tensor(base, copy.dtype), copy)


def _check_base(adapter: Adapter, adapted: Iterable[TensorAt]) -> None:
    """Refuse an adapter of our own training that belongs to other weights, as far as both have digests."""
    actual = digest_of_base((tensor.name, tensor.digest) for tensor in adapted)
    if None not in (adapter.base_digest, actual) and adapter.base_digest != actual:
        raise _other(adapter, "was trained on other weights: the digests of the tensors that it adapts differ")


def _compared(adapter: Adapter, base: TensorAt) -> TensorAt:
    """Return a tensor that is compared, when it is read, with the one that an adapter was trained on.

    A base in another dtype, or quantized, has other bytes in any case, and is not compared.
    """
    expected = adapter.base_tensors.get(base.name)
    if expected is None or {origin.dtype for origin in stored_origins(base)} != {expected.dtype}:
        return base
    digest = digest_of_ranges((base.digest,)) if base.digest is not None and len(expected.sizes) == 1 else None
    if sum(expected.sizes) != base.nbytes or digest not in (None, expected.digest):
        raise _other_base(adapter, base)
    if digest is not None:
        return base
    how = f"compared with the base of {adapter.location}"
    return derive(base, base.dtype, how, (base,), partial(_compared_blocks, adapter, base, expected))


def _compared_blocks(adapter: Adapter, base: TensorAt, expected: BaseTensor) -> Iterator[Buffer]:
    digests = list[str]()
    with closing(BlockReader(base.nbytes, partial(read_blocks, base))) as reader:
        for nbytes in expected.sizes:
            hasher, buffer = Hasher(), memoryview(bytearray(min(STEP_NBYTES, nbytes)))
            for begin in range(0, nbytes, STEP_NBYTES):
                block = buffer[: nbytes - begin]
                reader.read_into(block)
                hasher.update(block)
                yield block
            digests.append(hasher.hexdigest())
    if digest_of_ranges(digests) != expected.digest:
        raise _other_base(adapter, base)


def _other_base(adapter: Adapter, base: TensorAt) -> SourceError:
    return _other(adapter, f"was trained on other weights: {base.name} differs")


def _check_ties(adapter: Adapter, changed: Collection[str], checkpoint: Checkpoint) -> None:
    """Refuse to change all of a tied weight that is stored once: peft changes the one use of it that is adapted."""
    for group in checkpoint.shape.ties:
        stored = [fqn for fqn in group if fqn in checkpoint.tensors]
        if len(stored) == 1 and stored[0] in changed:
            problem = f"changes {stored[0]} alone, and the config ties {' and '.join(group)}"
            hint = "merge it with peft's merge_and_unload, and save the result with tie_word_embeddings set to false"
            raise SourceError(adapter.location, problem, hint, code="source.adapter-kind")


def _merged(base: TensorAt, terms: Sequence[Term]) -> TensorAt:
    from reshard.transforms.arithmetic import merged_blocks  # numpy

    origins = (base, *(tensor for term in terms for tensor in (term.a, term.b)))
    how = f"with {len(terms)} adapters added: {[(term.scale, term.expert, term.first) for term in terms]}"
    return derive(base, base.dtype, how, origins, partial(merged_blocks, base, tuple(terms)))


def _other(adapter: Adapter, problem: str) -> SourceError:
    hint = f"merge it into the model that it was trained on; if that is this one, {_BY_PEFT}"
    return SourceError(adapter.location, problem, hint, code=OTHER_ADAPTER)
