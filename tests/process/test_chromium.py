"""The report page and the site in a real Chromium: what a reader sees, points at, prints and finds."""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from manifests.placement import Placement
from runner.report.page import write_report
from tests.chromium import CHROMIUM, Page, opened
from tests.fast.runner.profiling.traced import write_metrics, write_traces

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="NO CHROMIUM: the pages are not seen in a browser")

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with a report that compares two runs."""
    folder = tmp_path_factory.mktemp("pages")
    for name in ("first", "second"):
        (folder / name).mkdir()
        write_metrics(folder / name)
        write_traces(folder / name, "1F1B", Placement(num_stages=4, num_ranks=4, style="loop"), 8)
    write_report(folder / "first", folder / "report.html", other_dir=folder / "second")
    return folder


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with opened(tmp_path_factory.mktemp("profile")) as page:
        yield page


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_page_is_as_wide_as_the_screen_and_follows_the_theme(browser: Page, pages: Path, *, dark: bool) -> None:
    for width in (1400, 400):
        browser.open(pages / "report.html", width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") == width
    colors = browser.run("(s => [s.backgroundColor, s.color])(getComputedStyle(document.body))")
    light = [sum(map(int, re.findall(r"\d+", color)[:3])) / 765 for color in colors]
    assert (light[0] < 0.2 and light[1] > 0.8) if dark else (light[0] > 0.9 and light[1] < 0.2)
    sizes = "[...document.querySelectorAll('svg text')].map(e => parseFloat(getComputedStyle(e).fontSize))"
    scale = "[...document.querySelectorAll('svg')].find(svg => svg.getBoundingClientRect().width).getScreenCTM().a"
    assert min(browser.run(sizes)) * browser.run(scale) >= 10.99
    assert browser.errors == []


def test_pointing_at_an_action_says_what_it_is(browser: Page, pages: Path) -> None:
    browser.open(pages / "report.html")
    assert browser.run("document.querySelector('.tip').hidden")
    browser.point_at('rect.act[data-rank="2"]')
    said = browser.run("document.querySelector('.tip').textContent")
    assert said.startswith("rank 2, stage 2: forward, microbatch 0, ran: 12.00 ms from ")
    assert not browser.run("document.querySelector('.tip').hidden")
    browser.press("Escape")
    assert browser.run("document.querySelector('.tip').hidden")
    browser.point_at("svg.chart")
    said = browser.run("document.querySelector('.tip').textContent")
    assert re.fullmatch(r"step \d\ntraining loss of first: [\d.]+\n(?:.*\n)*.*", said), said
    assert browser.errors == []


def test_zoom_by_button_and_by_key_shows_less_time_in_both_runs(browser: Page, pages: Path) -> None:
    browser.open(pages / "report.html")
    width = "[...document.querySelectorAll('svg.pipeline')].map(svg => parseFloat(svg.querySelectorAll('rect.act')[9]"
    width += ".getAttribute('width')))"
    whole = browser.run(width)
    browser.run("document.querySelector('.zoom button').click()")
    halved = browser.run(width)
    assert halved == pytest.approx([2 * each for each in whole], rel=1e-3)
    browser.run("document.querySelector('svg.pipeline').focus()")
    browser.press("-")
    assert browser.run(width) == pytest.approx(whole, rel=1e-3)
    browser.press("ArrowRight")
    assert browser.run("document.querySelector('.tip').textContent").startswith(
        "rank 0, stage 0: forward, microbatch 0"
    )
    assert browser.errors == []


def test_without_scripts_the_report_is_a_still_picture(browser: Page, pages: Path) -> None:
    browser.open(pages / "report.html", scripts=False)
    try:
        box = "(b => [b.width, b.height])(document.querySelector('rect.act').getBoundingClientRect())"
        width, height = browser.run(box)
        assert width > 5
        assert height == 22
        assert browser.run("document.querySelector('rect.act title').textContent").startswith(
            "rank 0, stage 0: forward"
        )
        assert browser.run("document.querySelector('.zoom') === null")
    finally:
        browser.open(pages / "report.html")


def test_tables_are_printed_whole(browser: Page, pages: Path) -> None:
    browser.open(pages / "report.html", 1000)
    browser.print_media()
    cut = (
        "[...document.querySelectorAll('pre, .table, figure')].filter(e => getComputedStyle(e).overflowX !== 'visible')"
    )
    assert browser.run(f"{cut}.length") == 0
    assert browser.run("document.documentElement.scrollWidth") == 1000
    assert browser.pdf().startswith(b"%PDF-")


@pytest.mark.slow
def test_the_site_is_searched_from_a_folder(browser: Page) -> None:
    subprocess.run([sys.executable, ROOT / "tools" / "site.py"], check=True, timeout=120)
    for place in ("index.html", "adr/index.html"):
        browser.open(ROOT / "build" / "site" / place)
        browser.run("document.querySelector('[data-md-component=search-query]').focus()")
        for key in "slurm":
            browser.press(key)
        links = "[...document.querySelectorAll('.md-search-result__link')].map(link => link.href)"
        look = f"const look = left => {links}.length || !left ? done({links}) : setTimeout(look, 100, left - 1)"
        found = browser.run(f"new Promise(done => {{ {look}; look(100) }})")
        assert found[:1] == [(ROOT / "build" / "site" / "cluster.html").as_uri() + "?h=slurm"]
        assert browser.errors == []
