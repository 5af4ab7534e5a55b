"""What the stages of a catalogue's architecture cannot be asked to train, as its config and layout say. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from manifests.errors import ModelError
from manifests.models.catalogue import CatalogueEntry
from manifests.models.config import ConfigReader

# Losses that need the routers of every stage or all logits, and layers that are skipped at random.
_OFF = (("output_router_logits", False), ("z_loss_coefficient", 0), ("layerdrop", 0))


def check_fields(entry: CatalogueEntry, config: ConfigReader) -> None:
    """Refuse fields that make a loss of more than the logits, or whole stages without gradients.

    Raises:
        InputError: naming the field.
    """
    for reader in (config, config.section(entry.section) if entry.section else None):
        for name, allowed in _OFF if reader is not None else ():
            assert reader is not None
            reader.expect(name, allowed)


def check_modules(entry: CatalogueEntry, known: Collection[str], stages: Iterable[Collection[str]], where: str) -> None:
    """Check that stages have modules of the text model only, of which `known` are all, and the inputs together.

    Raises:
        ModelError: one of them is for images or sound or for multi-token prediction, or the inputs are apart.
    """
    for modules in stages:
        for module in modules:
            if module in entry.towers:
                raise ModelError(
                    where,
                    f"{module} is for images or sound, which cannot be trained; the text model can",
                    f"pack the source again with --drop {' --drop '.join(entry.towers)}",
                    code="config.towers",
                )
            if module not in known:
                raise ModelError(
                    where,
                    f"{module} is for multi-token prediction, which cannot be trained",
                    f"pack the source again with --drop for the tensors of {module}",
                    code="config.mtp-layers",
                )
        for together in (entry.inputs, entry.outputs if entry.hands_on_trees else ()):
            found = [module for module in together if module in modules]
            if found and len(found) < len(together):
                raise ModelError(
                    where,
                    f"{' and '.join(together)} must be on one stage",
                    "choose a layout that does not cut before the first layer, or after the last",
                    code="model.split-inputs",
                )
