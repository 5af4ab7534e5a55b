"""Colors of the pictures and pages of both programs, light and dark, and what they mean.

A hue has one meaning: blue is forward, amber and brown are backward, teal is a weight's gradient, green is the model's
modules, rose is memory that a rank keeps from step to step, purple is a second run; gray is everything else. Colors
that mean something are the same in light and dark, so that one picture fits both; those of one panel differ in
lightness or hue with any of the three color blindnesses, and nothing is shown by color alone. Red is for alarm only:
what does not fit, and what failed.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

PLAIN, PURPLE = "#8d939c", "#895ac8"

# Kinds of modules.
KIND_COLORS: Mapping[str, str] = {
    "embedding": "#c5e5c8",
    "dense layers": "#4eaf56",
    "expert layers": "#3f8c45",
    "MTP layers": "#8acb90",
    "norm and head": "#306a35",
}
# F, B, I and W of `manifests.schedules.actions.Action`, and the loss.
WORK_COLORS: Mapping[str, tuple[str, str]] = {
    "F": ("forward", "#2f74c0"),
    "B": ("backward", "#f0a92e"),
    "I": ("backward, input gradients", "#8a5a12"),
    "W": ("backward, weight gradients", "#5fc0a8"),
    "L": ("loss", PLAIN),
}
# Fields of `manifests.models.memory.Memory`.
MEMORY_COLORS: Mapping[str, str] = {
    "weights": "#712e5d",
    "gradients": "#bb599e",
    "optimizer": "#d9a3c9",
    "activations": "#616972",
    "receive_buffers": "#ced2d5",
    "temporary": "#959ca4",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Theme:
    """The colors that differ between light and dark."""

    paper: str
    ink: str
    quiet: str  # secondary text, axes
    faint: str  # waiting, bands, lines of tables
    alarm: str

    @property
    def colors(self) -> Mapping[str, str]:
        return asdict(self)

    @property
    def css(self) -> str:
        return " ".join(f"--{name}: {color};" for name, color in self.colors.items())


THEMES: Mapping[str, Theme] = {
    "light": Theme(paper="#fefefe", ink="#1b1f24", quiet="#57606a", faint="#e7eaee", alarm="#b3261e"),
    "dark": Theme(paper="#0e1116", ink="#e8ebef", quiet="#a3acb7", faint="#252b33", alarm="#ff8a80"),
}


def contrast(color: str, background: str) -> float:
    """Return the contrast ratio of two colors, 1 to 21. Source: WCAG 2.2, "contrast ratio"."""
    low, high = sorted((_luminance(color), _luminance(background)))
    return (high + 0.05) / (low + 0.05)


def ink_on(color: str) -> str:
    """Return black or white, whichever is easier to read on a color; their contrast is never below 4.5."""
    return max(("#ffffff", "#000000"), key=lambda ink: contrast(ink, color))


def tint(color: str, shade: float) -> str:
    """Return a color mixed with white; 0 is the color itself, 1 is white."""
    return "#" + "".join(f"{round(part + (255 - part) * shade):02x}" for part in bytes.fromhex(color[1:]))


def _luminance(color: str) -> float:
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4
        for part in (byte / 255 for byte in bytes.fromhex(color[1:]))
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
