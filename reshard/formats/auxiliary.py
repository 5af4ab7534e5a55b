"""Auxiliary files of a source: those that a packed model gets, and those that an export gives back.

Files that describe the files of a source are wrong beside a packed model, and right beside an export of equal bytes.

# Note [A card's own text]
README.md is the source's, and people edit it on the hub. So the section that `reshard push` writes is between markers,
and taking it out gives the own text back, byte for byte; readers of a packed folder do so, and compare no digest of
this one file.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from manifests.errors import SourceError
from manifests.index import ADAPTER_NAMES, OTHER_WEIGHTS, is_weights
from manifests.invariants import MANIFEST_NAME, QUANTIZED_CONFIG, QUANTIZED_SOURCE, SOURCE_FILES, SOURCE_NAME
from manifests.models.adapters import RECORD_NAME
from manifests.paths import problem_with_path
from manifests.schema import GIT_ATTRIBUTES_NAME
from manifests.trained import RUN_FILES
from reshard.archives.names import DATA_SUFFIX, METADATA_NAME
from reshard.copy.journal import is_working_name
from reshard.tensors.checkpoint import AuxiliaryAt
from stores.base import Folder

# Digests and signatures.
_DESCRIBING = (
    "digests.json", ".sha1", ".sha256", ".sha512", ".md5", ".blake3", ".b3", ".sig", ".asc", ".sigstore",
    ".sigstore.json",
)  # fmt: skip
BESIDE_CONFIG = (  # what a run that trains on text needs
    "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "special_tokens_map.json", "added_tokens.json",
    "vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja",
)  # fmt: skip
_RESERVED = (MANIFEST_NAME, SOURCE_NAME, RECORD_NAME, QUANTIZED_CONFIG, QUANTIZED_SOURCE)
_SUMS = re.compile(r"(md5|sha\d+|b2|b3|blake2|blake3)sums?(\.txt)?|checksums?(\.\w+)?")


def describes_files(name: str) -> bool:
    """Whether a file has digests, signatures or names of the files beside it: wrong where the weights are elsewhere."""
    base = name.rpartition("/")[2].lower()
    return base.endswith(_DESCRIBING) or bool(_SUMS.fullmatch(base))


def describes_source(name: str) -> bool:
    """Whether a file describes the files of a source, or says how its repository stores them."""
    return describes_files(name) or name == GIT_ATTRIBUTES_NAME


def with_source_files(files: Sequence[AuxiliaryAt], *, is_same: bool) -> list[AuxiliaryAt]:
    """Return auxiliary files with those that describe the source's files in their places; without, unless `is_same`.

    Those of a training checkpoint are left out.
    """
    others = [item for item in files if not item.path.startswith(SOURCE_FILES) and item.path not in RUN_FILES]
    paths = {item.path for item in others}
    names = [(item, item.path.removeprefix(SOURCE_FILES)) for item in files if item.path.startswith(SOURCE_FILES)]
    described = [replace(item, path=name) for item, name in names if describes_source(name) and name not in paths]
    return [*others, *(described if is_same else ())]


_BEGIN, _END = "<!-- reshard: begin -->", "<!-- reshard: end -->"
_BEGIN_FIELDS, _END_FIELDS = "# reshard: begin", "# reshard: end"  # comments of YAML
_BEGIN_ALL = "# reshard: begin, the lines around included"
_SECTION = re.compile(rf"\n{_BEGIN}\n.*?\n{_END}\n".encode(), re.DOTALL)
_FIELDS = re.compile(rf"{_BEGIN_FIELDS}\n.*?\n{_END_FIELDS}\n".encode(), re.DOTALL)
_FRONT_MATTER = re.compile(rf"\A---\n{_BEGIN_ALL}\n.*?\n{_END_FIELDS}\n---\n".encode(), re.DOTALL)
_OWN_FRONT_MATTER = re.compile(rb"\A---\n(.*?)^---\n", re.DOTALL | re.MULTILINE)


def has_section(card: bytes) -> bool:
    return _SECTION.search(card) is not None


def without_section(card: bytes) -> bytes:
    """Return a card's own text."""
    return _SECTION.sub(b"", _FIELDS.sub(b"", _FRONT_MATTER.sub(b"", card, count=1), count=1))


def with_section(card: bytes, section: str, base_model: str | None) -> bytes:
    """Add a section to a card's own text, and `base_model` to its front matter unless it has one."""
    text = card + f"\n{_BEGIN}\n{section}\n{_END}\n".encode()
    if base_model is None:
        return text
    front_matter = _OWN_FRONT_MATTER.match(card)
    fields = f"---\n{_BEGIN_FIELDS if front_matter else _BEGIN_ALL}\nbase_model: {base_model}\n{_END_FIELDS}\n".encode()
    if front_matter is None:
        return fields + b"---\n" + text
    return text if re.search(rb"^base_model:", front_matter[1], re.MULTILINE) else fields + text[len(b"---\n") :]


def names_weights(name: str) -> bool:
    """Return whether a file beside the weights that are packed has a name of weights: other programs might read it.

    In any folder, those of DCP, such as transformers' Trainer writes of FSDP's weights and optimizer state, included.
    """
    is_metadata = name.rpartition("/")[2] == METADATA_NAME
    return is_weights(name) or is_metadata or name.lower().endswith((".safetensors", DATA_SUFFIX, *OTHER_WEIGHTS))


def auxiliary_files(folder: Folder, files: tuple[str, ...], weights: set[str]) -> tuple[AuxiliaryAt, ...]:
    """Return the files of a folder that are no `weights`."""
    auxiliary = []
    for name in files:
        if name in weights:
            continue
        if name in _RESERVED or name.startswith(("stage-", SOURCE_FILES)):
            reserved = "this name is reserved for files that pack writes"
            raise SourceError(str(folder.file(name)), reserved, "rename the file", code="source.reserved-name")
        if name in ADAPTER_NAMES:
            raise adapter_error(str(folder.file(name)))
        if is_working_name(name):
            reserved = "this name is reserved for temporary files"
            raise SourceError(str(folder.file(name)), reserved, "rename the file", code="source.reserved-name")
        if problem := problem_with_path(name):
            raise SourceError(str(folder.file(name)), problem, "rename the file", code="source.bad-file-name")
        path = f"{SOURCE_FILES}{name}" if describes_source(name) else name
        auxiliary.append(AuxiliaryAt(path=path, file=folder.file(name)))
    return tuple(auxiliary)


def adapter_error(where: str) -> SourceError:
    problem = "is an adapter, which transformers adds to the model as it opens the folder"
    hint = "merge it into the model, or move it to another folder"
    return SourceError(where, problem, hint, code="source.adapter")
