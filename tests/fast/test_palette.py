"""The colors of pictures and pages: what can be read, what can be told apart, and what red means."""

from __future__ import annotations

import colorsys
from itertools import combinations

import pytest

from manifests.command import palette
from manifests.command.palette import KIND_COLORS, MEMORY_COLORS, THEMES, WORK_COLORS, contrast, ink_on, tint

MEANINGS = {*KIND_COLORS.values(), *MEMORY_COLORS.values(), *(color for _, color in WORK_COLORS.values())}
PANELS = (tuple(KIND_COLORS.values()), tuple(color for _, color in WORK_COLORS.values()), tuple(MEMORY_COLORS.values()))
# Machado, Oliveira, Fernandes: A Physiologically-based Model for Simulation of Color Vision Deficiency (2009), table 1.
BLIND = {
    "protan": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "deutan": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "tritan": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def linear(color: str) -> list[float]:
    parts = [byte / 255 for byte in bytes.fromhex(color[1:])]
    return [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]


def lab(rgb: list[float]) -> tuple[float, float, float]:
    """CIELAB of linear sRGB, D65. Source: IEC 61966-2-1 and CIE 15."""
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    whole = (0.9505, 1.0, 1.089)
    x, y, z = (
        (lambda t: t ** (1 / 3) if t > 0.008856 else 7.787 * t + 16 / 116)(
            max(0.0, sum(a * b for a, b in zip(row, rgb, strict=True))) / white
        )
        for row, white in zip(rows, whole, strict=True)
    )
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


def test_contrast_is_that_of_the_published_examples() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # WebAIM: just too little
    assert contrast("#767676", "#ffffff") == pytest.approx(4.54, abs=0.005)


@pytest.mark.parametrize("theme", THEMES.values(), ids=THEMES)
def test_text_has_a_contrast_of_at_least_4_5(theme: palette.Theme) -> None:
    for text in (theme.ink, theme.quiet, theme.alarm):
        for ground in (theme.paper, theme.faint):
            assert contrast(text, ground) >= 4.5, (text, ground)


@pytest.mark.parametrize("shade", [0.0, 0.2, 0.4, 0.6])
def test_numbers_in_boxes_have_a_contrast_of_at_least_4_5(shade: float) -> None:
    for color in MEANINGS:
        assert contrast(ink_on(tint(color, shade)), tint(color, shade)) >= 4.5, color


def test_red_is_for_alarm_only() -> None:
    def is_red(color: str) -> bool:
        hue, _, saturation = colorsys.rgb_to_hls(*(byte / 255 for byte in bytes.fromhex(color[1:])))
        return saturation > 0.4 and not 0.055 < hue < 0.92

    assert [color for color in MEANINGS if is_red(color)] == []
    assert all(is_red(theme.alarm) for theme in THEMES.values())


@pytest.mark.parametrize("blindness", BLIND)
def test_colors_of_a_panel_differ_with_any_color_blindness(blindness: str) -> None:
    for panel in PANELS:
        for one, other in combinations(panel, 2):
            seen = [
                lab([sum(a * b for a, b in zip(row, linear(color), strict=True)) for row in BLIND[blindness]])
                for color in (one, other)
            ]
            distance = sum((a - b) ** 2 for a, b in zip(*seen, strict=True)) ** 0.5
            assert distance > 10, (one, other, distance)
