"""Pictures of plans: the format asked for, the text of the plan, the same bytes every time."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.text import Text

from manifests.command.palette import THEMES
from reshard.draw.sheet import sheet_of
from reshard.draw.theme import drawing
from reshard.estimate.assumptions import Assumptions
from reshard.packing.plan import plan
from tests.builders import Ended, reshard
from tests.fast.reshard.configs import write_config

ROOT = Path(__file__).parents[4]
PICTURES = ROOT / "docs" / "pictures"
SVG = "{http://www.w3.org/2000/svg}"
FLAGS = ("--seq-len", "16", "--microbatches", "8")


@pytest.fixture
def config(tmp_path: Path) -> Path:
    return write_config(tmp_path / "tiny.json", tie_word_embeddings=True)


def draw(config: Path, spec: str, out: Path, *more: str) -> Ended:
    return reshard("plan", config, "--layout", spec, "--draw", out, *FLAGS, *more)


def texts_of(svg: Path) -> list[str]:
    """Return the texts of a picture, line by line."""
    root = ElementTree.parse(svg).getroot()
    assert root.tag == f"{SVG}svg"
    return ["".join(text.itertext()) for text in root.iter(f"{SVG}text")]


def test_svg_has_the_text_of_the_plan_and_says_first_that_it_does_not_fit(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    ended = draw(config, "pp=4", out, "--gpu-memory", "80kB")
    assert ended.err == f"drawn: {out}\n"
    texts, lines = texts_of(out), ended.out.splitlines()
    assert lines[2].startswith("DOES NOT FIT: ")
    assert texts[texts.index("tiny: pp=4") + 1 :][:2] == [lines[2], lines[9]]
    assert re.match(r"rank 1 \(stage 1\) .*: 1\.88x ", lines[9])
    assert set(lines[9:12]) <= set(texts)
    assert "tied: model.embed_tokens.weight = lm_head.weight (a copy each on ranks 0 and 3)" in texts
    assert {"Schedule: 1F1B, 8 microbatches", "forward", "backward", "Work", "limit, 80.00 KiB"} <= set(texts)
    assert {
        "embedding",
        "dense layers",
        "norm and head",
        "Stages: KiB as stored",
        "KiB, estimated for fp32",
        "rank",
    } <= set(texts)
    for number in range(4):  # the stage, the row of the rank
        assert texts.count(str(number)) >= 2
    over = next(text for text in texts if text.startswith("Memory"))
    assert re.fullmatch(r"Memory: \d of 4 over the limit", over)


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
    colors = {}
    for theme in ("light", "dark", "auto"):
        out = tmp_path / f"{theme}.svg"
        draw(config, "pp=4", out, "--theme", theme)
        colors[theme] = set(re.findall(r"#[0-9a-f]{6}\b", out.read_text()))
    assert len(colors["light"] - colors["dark"]) == len(colors["dark"] - colors["light"]) == 4
    assert len(colors["light"] & colors["dark"]) > 8
    assert colors["light"] | colors["dark"] <= colors["auto"]


def test_every_color_that_is_light_has_its_dark_one_where_the_reader_prefers_it(config: Path, tmp_path: Path) -> None:
    draw(config, "pp=4", tmp_path / "plan.svg", "--gpu-memory", "80kB")
    svg = (tmp_path / "plan.svg").read_text()
    rules = dict(re.findall(r'\[style\*="([^"]+)"\] { ([^}]+) !important }', svg))
    drawn = re.findall(r"(?:fill|stroke): #[0-9a-f]{6}", svg.partition("</style>")[2])
    changed = {style for style in drawn if style.partition(": ")[2] in THEMES["light"].colors.values()}
    assert len(changed) >= 5
    assert {rules[style].partition(": ")[2] for style in changed} <= set(THEMES["dark"].colors.values())


def test_picture_says_what_it_is_to_those_who_cannot_see_it(config: Path, tmp_path: Path) -> None:
    ended = draw(config, "pp=4", tmp_path / "plan.svg")
    root = ElementTree.parse(tmp_path / "plan.svg").getroot()
    assert root.attrib["role"] == "img"
    named = {
        each.attrib["id"]: each.text for each in (root.find(f"{SVG}title"), root.find(f"{SVG}desc")) if each is not None
    }
    assert set(root.attrib["aria-labelledby"].split()) == set(named)
    assert named["title"] == "tiny: pp=4"
    assert ended.out.splitlines()[8] in named["desc"]


@pytest.mark.parametrize(
    ("name", "spec", "assumed"),
    [
        ("llama-3.1-405b", "pp=16", Assumptions(num_microbatches=128, memory_limit=2000 << 30)),
        pytest.param("deepseek-v3", "pp=16,vpp=2", Assumptions(num_microbatches=32), marks=pytest.mark.slow),
        ("llama-3.1-8b", "pp=4", Assumptions(memory_limit=60 << 30)),
        ("qwen2-0.5b", "pp=2,vpp=2,style=v", Assumptions(num_microbatches=64)),
    ],
)
def test_texts_are_at_least_11_px_within_the_picture_and_never_collide(
    name: str, spec: str, assumed: Assumptions
) -> None:
    config = ROOT / "tests" / "data" / "configs" / f"{name}.json"
    planned = plan(config, spec, assumed=assumed)
    with drawing(THEMES["light"]):
        figure = sheet_of(planned, THEMES["light"])
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        texts = [text for text in figure.findobj(Text) if text.get_visible() and text.get_text().strip()]
        boxes = [(text.get_text(), text.get_window_extent(canvas.get_renderer())) for text in texts]
    assert min(text.get_fontsize() for text in texts) >= 8.25  # 11 px
    assert [text for text, box in boxes if box.x0 < figure.bbox.x0 or box.x1 > figure.bbox.x1] == []
    crossing = [
        (one, other)
        for (one, a), (other, b) in combinations(boxes, 2)
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]
    assert crossing == []


@pytest.mark.parametrize("suffix", ["svg", pytest.param("png", marks=pytest.mark.slow)])
def test_same_plan_gives_the_same_bytes_in_another_process(config: Path, suffix: str, tmp_path: Path) -> None:
    first, second = tmp_path / f"first.{suffix}", tmp_path / f"second.{suffix}"
    draw(config, "pp=2,vpp=2", first)
    command = [sys.executable, "-m", "reshard", "plan", config, "--layout", "pp=2,vpp=2", "--draw", second, *FLAGS]
    environment = {"PYTHONHASHSEED": "7", "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "MPLBACKEND": "svg"}
    (tmp_path / "matplotlibrc").write_text("font.size: 30\naxes.grid: True\n")
    environment["MATPLOTLIBRC"] = str(tmp_path)
    subprocess.run(list(map(str, command)), cwd=ROOT, env=environment, check=True, capture_output=True, timeout=60)
    assert first.read_bytes() == second.read_bytes()


def test_256_ranks_are_drawn_in_a_small_file_with_the_slow_one_marked(tmp_path: Path) -> None:
    config = write_config(tmp_path / "deep.json", num_hidden_layers=259)
    draw(config, "E|(t|)*100,tttt|(t|)*153,ttL", tmp_path / "deep.svg", "--schedule", "GPipe")
    texts = texts_of(tmp_path / "deep.svg")
    assert any(re.match(r"rank 101 \(stage 101\) .*: 3\.95x ", text) for text in texts)
    assert "Schedule: GPipe, 8 microbatches" in texts
    assert texts.count("101") == 2  # the stage, the row of the rank
    assert (tmp_path / "deep.svg").stat().st_size < 1_500_000


def test_other_suffixes_are_refused_before_anything_is_planned(tmp_path: Path, wording: Callable[[str], None]) -> None:
    ended = draw(tmp_path / "nothing.json", "pp=4", tmp_path / "plan.pdf", "--json")
    assert ended.refusal == (2, "options.draw-suffix", "--draw")
    wording(ended.json["error"]["problem"])


def test_picture_that_exists_needs_force(config: Path, tmp_path: Path) -> None:
    out = tmp_path / "plan.svg"
    out.write_text("mine")
    assert draw(config, "pp=2", out, "--json").refusal == (3, "output.exists", str(out))
    assert out.read_text() == "mine"
    assert draw(config, "pp=2", out, "--force").code == 0
    assert out.read_text() != "mine"


def test_without_matplotlib_the_hint_is_what_to_install(config: Path, tmp_path: Path) -> None:
    code = "import sys; sys.modules['matplotlib'] = None; from reshard.cli import main; main()"
    args = ["plan", config, "--layout", "pp=2", "--draw", tmp_path / "plan.svg", "--json"]
    command = [sys.executable, "-c", code, *map(str, args)]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    error = json.loads(ended.stdout)["error"]
    assert (ended.returncode, error["code"], error["where"]) == (2, "options.needs-matplotlib", "--draw")
    assert error["hint"] == "pip install 'reshard[draw]'"


def test_pictures_in_the_docs_are_up_to_date(tmp_path: Path) -> None:
    commands = re.findall(r"^reshard (plan .*)$", (PICTURES / "draw.sh").read_text(), re.MULTILINE)
    assert len(commands) == 2
    for command in commands:
        *args, _, out = command.replace(" --force", "").split()
        fresh = tmp_path / Path(out).name
        reshard(*args, "--draw", fresh)
        assert texts_of(fresh) == texts_of(ROOT / out)
