"""Model families: from a Hugging Face config to the modules of one stage, and names both ways."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from manifests.errors import InputError
from manifests.jsontext import with_floats
from manifests.models import ModelShape, architecture_of, is_sized_by_files, model_shape
from manifests.models.config import CONFIG_NAME
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import check_trainable, find_family, generic_entry
from manifests.schema import ModelDescription
from runner.bundle.packed import Packed
from runner.models.family import Family

__all__ = ["Family", "family_for", "family_of", "import_family"]


def family_of(packed: Packed, max_seq_len: int) -> Family:
    """Return the family of a packed model, for sequences of at most `max_seq_len` tokens."""
    description = packed.manifest.model.description
    return family_for(packed.config, max_seq_len=max_seq_len, shape=packed.shape, description=description)


def family_for(
    config: Mapping[str, object],
    *,
    max_seq_len: int,
    shape: ModelShape | None = None,
    description: ModelDescription | None = None,
) -> Family:
    """Return the family of a Hugging Face config, for sequences of at most `max_seq_len` tokens.

    `shape` is the packed model's, which a family of another package requires, and which says whether there are MTP
    layers; `description` is its manifest's.
    """
    config = with_floats(config)
    architecture = architecture_of(config, CONFIG_NAME, description)
    if shape is not None and (entry_point := find_family(architecture)) is not None:
        check_trainable(architecture, is_described=description is not None)
        from runner.models.own import load_family, request_of

        return load_family(entry_point, request_of(shape, config, description, max_seq_len=max_seq_len))
    if not is_sized_by_files(config, CONFIG_NAME, description):
        architecture = model_shape(config).architecture  # MosaicML's MPT has another name in its own configs
    check_trainable(architecture, is_described=description is not None)
    if find_spec("transformers") is None:  # before the import, so that a failing import keeps its traceback
        problem = f"{architecture} trains on its model code, and it is not installed"
        raise InputError("transformers", problem, "pip install 'reshard[runner]'", code="system.missing-package")
    from runner.models.generic import Generic
    from runner.models.implementations import check_model_type

    if config.get("model_type") is not None and description is None:
        check_model_type(config, architecture)
    entry = generic_entry(architecture)
    assert entry is not None, architecture
    return Generic(entry, config, max_seq_len=max_seq_len, mtp=MtpLayers.find(entry, shape))


def import_family(config: Mapping[str, object]) -> None:
    """Import the code of `family_for`, and of the self-check, unless it is another package's."""
    architecture = architecture_of(config)
    if find_family(architecture) is not None:
        return
    import_module("runner.models.generic")
    getattr(import_module("transformers"), architecture)
