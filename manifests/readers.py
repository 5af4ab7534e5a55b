"""The file names that programs which open a Hugging Face folder look for, whoever put the files there.

# Note [Names that readers consult]
A manifest vouches for the files that it lists. transformers, vLLM and others never see it: they look for names, and
`model.safetensors` is preferred to the index, an `adapter_config.json` to the model beside it. So a file of such a name
that no manifest lists is a difference, and an auxiliary file may not have the name of weights. The names are compared
with the sources of transformers in `tests/fast/reshard/formats/huggingface/test_consulted.py`, which fails when it
consults another.
"""

from __future__ import annotations

# Weights in other formats than safetensors, by suffix.
OTHER_WEIGHTS = (
    ".bin", ".ckpt", ".gguf", ".h5", ".mlmodel", ".msgpack", ".npz", ".onnx", ".onnx_data", ".ot", ".pb", ".pt", ".pth",
    ".tflite",
)  # fmt: skip
ADAPTER_NAMES = ("adapter_config.json", "adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
# Configs and indices, templates, code, vocabularies, and what programs unpickle or unpack.
_SUFFIXES = (
    ".bpe", ".codes", ".faiss", ".jinja", ".json", ".model", ".pkl", ".py", ".so", ".spm", ".tensors", ".tiktoken",
    ".tokenizer", ".vocab", ".yaml", ".yml",
)  # fmt: skip
_PREFIXES = ("tokenizer.", "vocab.", "merges.", "dict.", "emoji.", "spiece.", "sentencepiece.", "bpe.", "requirements.")
CONSULTED_FOLDERS = ("additional_chat_templates", "custom_generate")
_OURS = ("digests.json",)  # of `reshard check --digests write`


def is_weights(path: str) -> bool:
    """Return whether a file has a name that readers of a folder take for weights or for an index of them."""
    name = path.lower()
    return "/" not in name and name.endswith((".safetensors", ".index.json", ".tensors", *OTHER_WEIGHTS))


def is_consulted(path: str) -> bool:
    """Return whether programs that open a folder may read a file of this path; see Note [Names that readers consult].

    Files in other folders than these are read only if a listed file or a caller names them.
    """
    folder, _, name = path.lower().rpartition("/")
    if folder and folder.split("/")[0] not in CONSULTED_FOLDERS:
        return False
    is_named = name.endswith(_SUFFIXES) or name.startswith(_PREFIXES)
    return (is_named or is_weights(name)) and not name.startswith(".") and path not in _OURS
