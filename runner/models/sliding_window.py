"""Which layers see a window of the last keys alone."""

from __future__ import annotations

from collections.abc import Sequence

from manifests.models import ConfigReader

__all__ = ["windows_of"]

_KINDS = ("full_attention", "sliding_attention")


def windows_of(read: ConfigReader, window: int | None, usual: Sequence[bool]) -> tuple[int | None, ...]:
    """Return each layer's window: as in `layer_types`, or the usual ones where the config lacks it.

    Raises:
        InputError: an unknown kind of layer, a wrong number of layers, or windows without a width.
    """
    kinds = read.names("layer_types") or tuple(_KINDS[is_sliding] for is_sliding in usual)
    if len(kinds) != len(usual):
        raise read.error(
            "layer_types", f"expected {len(usual)}, one for each layer, found {len(kinds)}", code="config.invalid-field"
        )
    if unknown := sorted(set(kinds).difference(_KINDS)):
        raise read.error(
            "layer_types", f"{unknown[0]!r} is not supported", f"known: {', '.join(_KINDS)}", code="config.not-modelled"
        )
    if window is None and _KINDS[1] in kinds:
        raise read.error(
            "sliding_window",
            "expected a positive integer, found nothing",
            "layer_types asks for windows",
            code="config.invalid-field",
        )
    return tuple(window if kind == _KINDS[1] else None for kind in kinds)
