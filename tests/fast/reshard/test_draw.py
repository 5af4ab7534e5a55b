"""Pictures of plans: of the kind asked for, saying what the plan says, the same every time."""

from __future__ import annotations

import re
import subprocess
import sys
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest

from reshard.draw.stages import stage_bytes
from reshard.estimate.training_estimate import Assumptions
from reshard.operations.resolve import LayoutRequest, estimate_step, lay_out
from reshard.sources.open import open_source
from tests.builders import Ended, reshard
from tests.fast.reshard.configs import modules_of, write_config, write_times
from tests.fast.trained import write_trained

ROOT = Path(__file__).parents[3]
PICTURES = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
FLAGS = ("--seq-len", "16", "--microbatches", "8")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "tiny.json", tie_word_embeddings=True)


def draw(config: Path, spec: str, out: Path, *more: str) -> Ended:
    return reshard("plan", config, "--layout", spec, "--draw", out, *FLAGS, *more)


def texts_of(svg: Path) -> list[str]:
    """Return what a picture says, line by line."""
    root = ElementTree.parse(svg).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_svg_says_what_the_plan_says_and_names_the_bottleneck(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    ended = draw(config, "pp=4", out, "--memory-limit", "80kB")
    assert ended.err == f"drawn: {out}\n"
    texts, said = texts_of(out), ended.out.splitlines()
    named = "rank 1 (stage 1) is the bottleneck: it takes 1.88 times the mean rank's time"
    assert texts[texts.index("tiny: pp=4") + 1] == named == said[8]
    assert set(said[8:11]) <= set(texts)
    assert "tied: model.embed_tokens.weight = lm_head.weight (a copy each on ranks 0 and 3)" in texts
    assert {"Schedule: 1F1B, 8 microbatches", "forward", "backward", "Work", "limit, 80.00 KiB"} <= set(texts)
    assert {"embedding", "dense layers", "norm and head", "KiB", "KiB, estimated for fp32", "rank"} <= set(texts)
    for number in range(4):  # a stage, its rank, and the rank's row
        assert texts.count(str(number)) >= 3
    over = next(text for text in texts if text.startswith("Memory"))
    assert re.fullmatch(r"Memory: \d of 4 over the limit", over)


def test_bars_of_a_training_checkpoint_are_the_bytes_of_its_weights(tmp_path: Path) -> None:
    checkpoint = open_source(str(write_trained(tmp_path, "pp=2")))
    planned = estimate_step(lay_out("tiny", checkpoint, LayoutRequest(spec="pp=4"), Assumptions()))
    bars = zip(*stage_bytes(planned).values(), strict=True)
    assert list(map(sum, bars)) == [stage.nbytes for stage in planned.plan.stages]


def test_tie_on_one_rank_is_one_copy(config: Path, tmp_path: Path) -> None:
    draw(config, "pp=2,vpp=2,style=v", tmp_path / "v.svg")
    texts = texts_of(tmp_path / "v.svg")
    assert "tied: model.embed_tokens.weight = lm_head.weight (one copy, rank 0)" in texts
    assert {"virtual 0", "virtual 1", "backward, of inputs", "backward, of weights"} <= set(texts)


def test_measured_times_give_the_axis_its_seconds(config: Path, tmp_path: Path) -> None:
    times = write_times(tmp_path / "times.json", dict.fromkeys(modules_of(4), (0.002, 0.004)))
    draw(config, "pp=2", tmp_path / "measured.svg", "--cost", str(times))
    assert "time, ms" in texts_of(tmp_path / "measured.svg")


@pytest.mark.parametrize("theme", ["light", "dark"])
def test_png_is_a_png_in_either_theme(config: Path, theme: str, tmp_path: Path) -> None:
    draw(config, "pp=2", tmp_path / "plan.png", "--theme", theme)
    data = (tmp_path / "plan.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = int.from_bytes(data[16:20]), int.from_bytes(data[20:24])
    assert width == 1690
    assert 700 < height < 1000
    assert b"Software" not in data


def test_themes_differ_in_paper_and_ink_and_agree_on_the_rest(config: Path, tmp_path: Path) -> None:
    colours = {}
    for theme in ("light", "dark"):
        out = tmp_path / f"{theme}.svg"
        draw(config, "pp=4", out, "--theme", theme)
        colours[theme] = set(re.findall(r"#[0-9a-f]{6}\b", out.read_text()))
    assert len(colours["light"] - colours["dark"]) == len(colours["dark"] - colours["light"]) == 4
    assert len(colours["light"] & colours["dark"]) > 8


def test_page_stands_alone_and_follows_the_readers_theme(config: Path, tmp_path: Path) -> None:
    ended = draw(config, "pp=4", tmp_path / "plan.html")
    page = (tmp_path / "plan.html").read_text()
    assert page.startswith("<!DOCTYPE html>")
    assert page.count("<svg ") == page.count("</svg>") == 1
    assert "://" not in page
    assert not re.findall(r'(?:src|href)="(?!#)', page)
    assert not re.search(r"<(?:script|link|iframe|object)|@import|url\((?!#)", page)
    assert "prefers-color-scheme: dark" in page
    light = re.search(r":root { (.*?) }", page)
    assert light is not None
    for colour in re.findall(r"#[0-9a-f]{6}", light[1]):
        assert page.count(colour) == 1  # everywhere else it is the style sheet's
    assert ended.out.rstrip() in unescape(page)


@pytest.mark.parametrize("suffix", ["svg", "png", "html"])
def test_same_plan_gives_the_same_bytes_in_another_process(config: Path, suffix: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw(config, "pp=2,vpp=2", first)
    command = [
        sys.executable,
        "-m",
        "reshard",
        "plan",
        config,
        "--layout",
        "pp=2,vpp=2",
        "--draw",
        second,
        *FLAGS,
    ]
    environment = {"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MPLBACKEND": "svg"}
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.grid: True\n")
    environment["MATPLOTLIBRC"] = str(tmp_path)
    subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    assert first.read_bytes() == second.read_bytes()


def test_256_ranks_are_drawn_in_a_small_file_with_the_slow_one_marked(tmp_path: Path) -> None:
    config = write_config(tmp_path / "deep.json", num_hidden_layers=259)
    draw(config, "E|(t|)*100,tttt|(t|)*153,ttL", tmp_path / "deep.svg", "--schedule", "GPipe")
    texts = texts_of(tmp_path / "deep.svg")
    assert "rank 101 (stage 101) is the bottleneck: it takes 3.95 times the mean rank's time" in texts
    assert "Schedule: GPipe, 8 microbatches" in texts
    assert texts.count("101") == 3  # stage, its rank, the rank's row
    assert (tmp_path / "deep.svg").stat().st_size < 1_500_000


def test_many_short_actions_become_pixels(tmp_path: Path) -> None:
    config = write_config(tmp_path / "deep.json", num_hidden_layers=62)
    draw(config, "pp=64", tmp_path / "deep.svg", "--microbatches", "128")
    assert "mixed: too short to tell apart" in texts_of(tmp_path / "deep.svg")
    assert b"data:image/png;base64," in (tmp_path / "deep.svg").read_bytes()
    assert (tmp_path / "deep.svg").stat().st_size < 1_000_000


def test_other_kinds_of_file_are_refused_before_anything_is_planned(tmp_path: Path) -> None:
    ended = draw(tmp_path / "nothing.json", "pp=4", tmp_path / "plan.pdf")
    assert (ended.code, ended.err) == (
        2, "error: --draw: 'plan.pdf' is no picture\nhint: end it in .svg, .png, .html\n"
    )  # fmt: skip


def test_picture_that_exists_needs_force(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    out.write_text("mine")
    ended = draw(config, "pp=2", out)
    assert (ended.code, out.read_text()) == (3, "mine")
    assert ended.err == f"error: {out}: already exists\nhint: choose another --draw, or replace it with --force\n"
    assert draw(config, "pp=2", out, "--force").code == 0
    assert out.read_text() != "mine"


def test_folder_that_cannot_be_written_is_one_sentence(config: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    ended = draw(config, "pp=2", tmp_path / "file" / "plan.svg")
    assert (ended.code, len(ended.err.splitlines())) == (3, 1)
    assert ended.err.startswith(f"error: --draw {tmp_path}/file/plan.svg: ")


def test_without_matplotlib_one_sentence_says_what_to_install(config: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from reshard.cli import main; main()"
    command = [sys.executable, "-c", code, "plan", config, "--layout", "pp=2", "--draw", tmp_path / "plan.svg"]
    ended = subprocess.run(list(map(str, command)), cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (ended.returncode, ended.stdout, ended.stderr) == (
        2,
        "",
        "error: --draw: matplotlib draws the pictures, and is not installed\nhint: pip install 'reshard[draw]'\n",
    )


def test_pictures_in_the_docs_say_what_plan_says_today(tmp_path: Path) -> None:
    commands = re.findall(r"^reshard (plan .*)$", (PICTURES / "draw.sh").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        *args, _, out = command.replace(" --force", "").split()
        fresh = tmp_path / Path(out).name
        reshard(*args, "--draw", fresh)
        assert texts_of(fresh) == texts_of(ROOT / out)
