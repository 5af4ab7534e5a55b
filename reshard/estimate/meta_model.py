"""What transformers knows of a model by its config alone: its tensors, and their values before any training.

In a process of its own, `python -m reshard.estimate.meta_model`: the only module of reshard that imports torch and
transformers, and no part of a pack imports either. The model is built on the meta device.

# Note [Initial weights]
Each tensor is materialized alone, seeded by its name, and given to transformers' `_init_weights` of its module and of
the modules around it, innermost first, as transformers itself calls them. So memory is that of the largest tensor, and
no tensor depends on another, or on a layout.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from manifests.command.interpreter import module_command, safe_environment
from manifests.digest import Hasher
from manifests.errors import ModelError, Parameter, UnreachableError, UsageError
from manifests.index import INDEX_NAME, encode_index
from manifests.models import architecture_of
from manifests.models.catalogue import entry_of
from manifests.models.config import MAX_LAYERS, ConfigReader
from manifests.models.shape import Shape, StoredTensors
from manifests.safetensors import encode_header, layout_tensors
from manifests.store import write_file

_LIMIT_S = 300.0
# Beginnings of the names of fields that say how a model runs or where code is, not which tensors it has.
_NOT_SIZES = (
    "quantization_config", "auto_map", "attn_implementation", "_attn_implementation", "experts_implementation",
    "_experts_implementation", "transformers_weights", "torch_dtype", "dtype",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class InitialWeights:
    """The folder that initial weights are written to, torch's name of their dtype, and the seed."""

    folder: Path
    dtype: str
    seed: int


def tensors_by_class(
    config: Mapping[str, object], architecture: str, where: str
) -> tuple[dict[str, object], StoredTensors]:
    """Return a config with what its class means by the fields that it lacks, and the tensors that files would have.

    Weights are as they are before a quantization.
    """
    _check_layers(config, architecture, where)
    plain = _without(config, _NOT_SIZES)
    answer = _ask(plain, architecture, where, limit_s=_LIMIT_S)
    tensors = {name: tuple(shape) for name, shape in answer["tensors"].items()}
    return {**answer["config"], **plain}, StoredTensors(tensors=tensors, where=where)


def write_initial(
    config: Mapping[str, object],
    where: str,
    names: Iterable[str],
    start: InitialWeights,
    lock: int,
    on_written: Callable[[int], object] = lambda nbytes: None,
) -> dict[str, bytes]:
    """Write a model of these tensors as transformers initializes it, and return their BLAKE3 digests.

    See Note [Initial weights]. `lock` is the descriptor of the folder's lock, which the writing process inherits: it
    ends with this one, and until then nobody else has the folder. `on_written` gets the bytes of each tensor.
    """
    words = (str(start.folder.resolve()), start.dtype, str(start.seed))
    architecture = architecture_of(config, where)
    document = {"config": _without(config, _NOT_SIZES), "names": sorted(names), "parent": os.getpid()}
    answer = _ask(document, architecture, where, *words, locks=(lock,), on_written=on_written)
    return {name: bytes.fromhex(digest) for name, digest in answer["tensors"].items()}


def _ask(
    config: Mapping[str, object],
    architecture: str,
    where: str,
    *arguments: str,
    limit_s: float | None = None,
    locks: Collection[int] = (),
    on_written: Callable[[int], object] | None = None,
) -> dict[str, Any]:
    """Run this module as a process of its own, and return what it answers."""
    command = module_command("reshard.estimate.meta_model", architecture, *arguments)
    document, environment = json.dumps(config), safe_environment()
    try:
        if on_written is not None:
            done = _watch(command, document, environment, locks, on_written)
        else:
            done = subprocess.run(
                command, input=document, env=environment, capture_output=True, text=True, timeout=limit_s
            )
    except subprocess.TimeoutExpired as error:
        problem = f"{architecture} was not built on the meta device within {limit_s:.0f} s"
        raise ModelError(where, problem, "give the folder with its safetensors", code="config.not-buildable") from error
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1]) if done.returncode == 0 else {}
    if "tensors" in answer:
        return answer
    if "errno" in answer:
        raise OSError(answer["errno"], os.strerror(answer["errno"]), answer["file"])
    if done.returncode < 0 or "memory" in answer:
        reason = answer.get("memory") or f"its process was killed by {signal.Signals(-done.returncode).name}"
        problem, hint = f"{architecture} was not built: {reason}", "free memory: a whole tensor must fit; see dmesg"
        raise UnreachableError(where, problem, hint, code="system.out-of-memory")
    if "unset" in answer:
        problem = f"cannot initialize {answer['unset']}: {architecture} sets it as it is built, or with other tensors"
        hint = "write a model with transformers, from_config(config).save_pretrained(FOLDER), and pack FOLDER"
        raise UsageError(Parameter("init"), problem, hint, code="options.init")
    if "missing" in answer:
        raise ModelError(
            f"{where}: architectures",
            f"the tensors of {architecture} are known from its weights, or with torch and transformers; config.json is "
            f"alone, and {answer['missing']} is not installed",
            "pip install 'reshard[runner]', or give the folder with its safetensors; their headers are enough",
            code="config.needs-weights",
        )
    reason = answer.get("error") or (done.stderr.strip().splitlines() or [f"it exited with {done.returncode}"])[-1]
    raise ModelError(
        where, f"transformers cannot build {architecture}: {reason[:300]}", "correct the field that it names",
        code="config.not-buildable",
    )  # fmt: skip


def _watch(
    command: Sequence[str],
    document: str,
    environment: Mapping[str, str],
    locks: Collection[int],
    on_written: Callable[[int], object],
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end; each line of its output that is a number is passed on while it runs."""
    with (
        TemporaryFile("w+") as errors,
        subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            pass_fds=locks,
        ) as process,
    ):
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            with contextlib.suppress(BrokenPipeError), process.stdin:  # it has ended: its exit code says why
                process.stdin.write(document)
            lines: list[str] = []
            for line in process.stdout:
                if line.strip().isdecimal():
                    on_written(int(line))
                else:
                    lines.append(line)
        except BaseException:
            process.kill()
            raise
        code = process.wait()
        errors.seek(0)
        return subprocess.CompletedProcess(command, code, "".join(lines), errors.read())


def _check_layers(config: Mapping[str, object], architecture: str, where: str) -> None:
    entry = entry_of(architecture)
    assert entry is not None, architecture
    reader: ConfigReader | None = ConfigReader(config, where)
    if entry.section and reader is not None:
        reader = reader.section(entry.section)
    for name in entry.count:
        if reader is not None and reader.has(name) and not isinstance(reader.config[name], list):
            reader.count(name, most=MAX_LAYERS)


def _without(config: Mapping[str, object], names: tuple[str, ...]) -> dict[str, object]:
    """Return a config, and the objects in it, without these fields."""
    return {
        name: _without(value, names) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if not name.startswith(names)
    }


def build(architecture: str, config: Mapping[str, object]) -> tuple[dict[str, Any], dict[str, Shape]]:
    """Build a model of transformers on the meta device; return its whole config, and its tensors as files have them.

    The second one of tied tensors is left out, as files leave it out.
    """
    from transformers.core_model_loading import revert_weight_conversion

    model, state = _build_on_meta(architecture, config)
    files = revert_weight_conversion(model, state)
    document = {**model.config.to_dict(), "architectures": [architecture]}
    return json.loads(json.dumps(document, default=str)), {name: tuple(tensor.shape) for name, tensor in files.items()}


def _build_on_meta(architecture: str, config: Mapping[str, object]) -> tuple[Any, dict[str, Any]]:
    """Return a model and its state, without the second one of tied tensors."""
    import torch
    import transformers

    model_class = getattr(transformers, architecture)
    fields = {name: value for name, value in config.items() if name != "architectures"}
    with torch.device("meta"):
        model = model_class(model_class.config_class.from_dict(fields))
    state = dict(model.state_dict())
    if getattr(model.config, "tie_word_embeddings", False):
        for replica in model._tied_weights_keys or {}:
            state.pop(replica, None)
    return model, state


SHARD_NBYTES, SHARD_NAME = 4 << 30, "model-{:05d}.safetensors"
_KINDS = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "int64": "I64", "int32": "I32", "bool": "BOOL"}


def initialize(
    architecture: str, config: Mapping[str, object], names: Collection[str], start: InitialWeights
) -> dict[str, str]:
    """Write a model's initial weights as shards and, last, their index; the folder exists.

    Each shard gets its name once it is complete. Returns the BLAKE3 digests, in hex, of the tensors as files have them.
    """
    import torch
    from transformers.core_model_loading import revert_weight_conversion

    torch.set_default_dtype(getattr(torch, start.dtype))
    model, state = _build_on_meta(architecture, config)
    written = {name: revert_weight_conversion(model, {name: tensor}) for name, tensor in state.items()}
    whole = {name: tuple(tensor.shape) for name, tensor in revert_weight_conversion(model, state).items()}
    if {name: tuple(tensor.shape) for files in written.values() for name, tensor in files.items()} != whole:
        raise ValueError("files join several tensors of the model in one, which is not supported")
    if others := sorted(whole.keys() ^ set(names)):
        raise ValueError(f"transformers' model and config.json differ in {len(others)} tensors, such as {others[0]}")
    sizes = {name: sum(tensor.nbytes for tensor in files.values()) for name, files in written.items()}
    shards: list[list[str]] = [[]]
    for name, nbytes in sizes.items():
        if shards[-1] and sum(sizes[other] for other in shards[-1]) + nbytes > SHARD_NBYTES:
            shards.append([])
        shards[-1].append(name)
    weights: dict[str, Sequence[str]] = {}
    digests: dict[str, str] = {}

    def pieces(header: bytes, sources: Sequence[str]) -> Iterator[bytes | memoryview]:
        yield header
        for source in sources:
            initial = {source: _initial(model, source, start.seed)}
            for name, tensor in revert_weight_conversion(model, initial).items():
                data = memoryview(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())
                digests[name] = Hasher(data).hexdigest()
                yield data
                print(data.nbytes, flush=True)  # the parent shows it

    for number, sources in enumerate(shards, 1):
        path = SHARD_NAME.format(number)
        files = {name: tensor for source in sources for name, tensor in written[source].items()}
        kinds = [(name, _KINDS[str(tensor.dtype)[6:]], tuple(tensor.shape)) for name, tensor in files.items()]
        write_file(start.folder / path, pieces(encode_header(layout_tensors(kinds), {"format": "pt"}), sources))
        weights[path] = [*files]
    write_file(start.folder / INDEX_NAME, encode_index(weights, sum(sizes.values())))
    return digests


def _initial(model: Any, fqn: str, seed: int) -> Any:
    """Return one tensor of a model on the meta device as transformers initializes it."""
    import torch
    from transformers import PreTrainedModel

    *path, leaf = fqn.split(".")
    modules, owners = [model], [model]  # from the model to the module of the tensor; whose _init_weights each takes
    for name in path:
        module = getattr(modules[-1], name)
        modules.append(module)
        owners.append(module if isinstance(module, PreTrainedModel) else owners[-1])
    table = next(table for table in (modules[-1]._parameters, modules[-1]._buffers) if leaf in table)
    meta = table[leaf]
    unset = float("nan") if meta.dtype.is_floating_point else torch.iinfo(meta.dtype).max
    tensor = torch.full_like(meta, unset, device="cpu")
    table[leaf] = torch.nn.Parameter(tensor, requires_grad=False) if isinstance(meta, torch.nn.Parameter) else tensor
    digest = hashlib.blake2b(f"{seed} {fqn}".encode(), digest_size=8).digest()
    torch.manual_seed(int.from_bytes(digest, "big") >> 1)
    try:
        with torch.no_grad():
            for module, owner in zip(reversed(modules), reversed(owners), strict=True):
                owner._init_weights(module)
            result = table[leaf].detach()
    except NotImplementedError as error:  # of values that are computed on the meta device, with those of others
        raise _UnsetError(fqn) from error
    finally:
        table[leaf] = meta
    if result.sum().isnan() or (not result.is_floating_point() and bool((result == unset).any())):
        raise _UnsetError(fqn)
    return result


class _UnsetError(Exception):
    """Transformers' `_init_weights` does not initialize this tensor by itself."""


def main() -> None:
    """Read a config from standard input, and print a line of JSON: the tensors, or what went wrong.

    With a folder, a dtype and a seed, also write its initial weights.
    """
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    try:
        if sys.argv[2:]:
            folder, dtype, seed = sys.argv[2:]
            document = json.load(sys.stdin)
            end_with(document["parent"])
            start = InitialWeights(folder=Path(folder), dtype=dtype, seed=int(seed))
            answer: dict[str, Any] = {"tensors": initialize(sys.argv[1], document["config"], document["names"], start)}
        else:
            document, tensors = build(sys.argv[1], json.load(sys.stdin))
            answer = {"config": document, "tensors": tensors}
    except ImportError as error:
        answer = {"missing": error.name or str(error)}
    except _UnsetError as error:
        answer = {"unset": str(error)}
    except MemoryError as error:
        answer = {"memory": str(error) or "memory could not be allocated"}
    except Exception as error:  # whatever transformers raises of a config
        text = f"{type(error).__name__}: {' '.join(str(error).split())}"
        if isinstance(error, OSError) and error.errno and sys.argv[2:]:
            answer = {"errno": error.errno, "file": str(error.filename or sys.argv[2])}
        else:
            answer = {"memory" if _ALLOCATION in text else "error": text}
    print(json.dumps(answer))


_PR_SET_PDEATHSIG = 1  # of prctl, in Linux's sys/prctl.h
_ALLOCATION = "DefaultCPUAllocator"  # of torch's RuntimeError, when no memory can be allocated


def end_with(parent: int) -> None:
    """Be killed when the parent process ends, for whatever reason; exit if it has ended already."""
    with contextlib.suppress(AttributeError):  # not Linux
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, int(signal.SIGKILL))
    if os.getppid() != parent:
        os._exit(1)


if __name__ == "__main__":
    main()
