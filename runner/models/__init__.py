"""Model families: from a Hugging Face config to the modules of one stage, and names both ways."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from importlib.util import find_spec

from manifests.errors import InputError
from manifests.jsontext import with_floats
from manifests.models import ModelShape, architecture_of, is_sized_by_files, model_shape
from manifests.models.mtp import MtpLayers
from manifests.models.trainable import (
    Implementation,
    check_trainable,
    choose_implementation,
    find_family,
    generic_entry,
)
from manifests.schema import ModelDescription
from runner.models.family import Family

__all__ = ["Family", "family_for", "import_family"]


def family_for(
    config: Mapping[str, object],
    *,
    max_seq_len: int,
    where: str = "config.json",
    implementation: Implementation | None = None,
    shape: ModelShape | None = None,
    description: ModelDescription | None = None,
) -> Family:
    """Return the family of a Hugging Face config, for sequences of at most `max_seq_len` tokens.

    `shape` is the packed model's, which a family of another package requires, and which says whether there are MTP
    layers; `description` is its manifest's.
    """
    config = with_floats(config)
    architecture = architecture_of(config, where, description)
    if shape is not None and (entry_point := find_family(architecture)) is not None:
        check_trainable(architecture, where, is_described=description is not None)
        from runner.models.own import load_family, request_of

        return load_family(entry_point, request_of(shape, config, description, max_seq_len=max_seq_len, where=where))
    if not is_sized_by_files(config, where, description):
        architecture = model_shape(config, where).architecture  # MosaicML's MPT has another name in its own configs
    check_trainable(architecture, where, is_described=description is not None)
    chosen = choose_implementation(architecture, implementation)
    is_usual = config.get("model_type") in (None, "llama" if chosen == "torchtitan" else None)
    if not is_usual and find_spec("transformers") is not None and description is None:  # it takes a second to import
        from runner.models.implementations import check_model_type

        check_model_type(config, architecture, where)
    if chosen == "transformers":
        return _generic(architecture, config, max_seq_len, where, shape)
    return _titan(architecture, config, max_seq_len, where)


def import_family(config: Mapping[str, object], implementation: Implementation | None) -> None:
    """Import the code of `family_for`, and of the self-check, unless it is another package's."""
    architecture = architecture_of(config, "config.json", None)
    if find_family(architecture) is not None:
        return
    if choose_implementation(architecture, implementation) == "transformers":
        import_module("runner.models.generic")
    else:
        import_module("runner.models.torchtitan")
    getattr(import_module("transformers"), architecture)


def _titan(architecture: str, config: Mapping[str, object], max_seq_len: int, where: str) -> Family:
    _check_installed("torchtitan", f"{architecture} was asked for on its modules", "pip install 'reshard[torchtitan]'")
    # torchtitan takes seconds to import: not before a model is wanted.
    from runner.models.torchtitan import TitanLlama

    return TitanLlama(config, max_seq_len=max_seq_len, where=where)


def _generic(
    architecture: str, config: Mapping[str, object], max_seq_len: int, where: str, shape: ModelShape | None
) -> Family:
    _check_installed("transformers", f"{architecture} trains on its model code", "pip install 'reshard[runner]'")
    from runner.models.generic import Generic

    entry = generic_entry(architecture)
    assert entry is not None, architecture
    return Generic(entry, config, max_seq_len=max_seq_len, where=where, mtp=MtpLayers.find(entry, shape))


def _check_installed(package: str, why: str, hint: str) -> None:
    # Asked of the installation before the import, so that a failing import keeps its traceback.
    if find_spec(package) is None:
        raise InputError(package, f"{why}, and it is not installed", hint, code="system.missing-package")
