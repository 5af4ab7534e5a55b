"""`reshard layout`: what a layout means, without a model."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from tests.builders import llama_config, reshard

DOCS = Path(__file__).parents[4] / "docs" / "layouts.md"


def test_layout_is_the_same_in_a_table_and_in_json() -> None:
    args = ("layout", "E|t|t*2|t||(t|)*2,t*2,L", "--layers", "8", "--pp", "4")
    assert reshard(*args).out == (
        "8 stages on 4 pipeline ranks, style loop\n"
        "stage  rank  vpp  modules\n"
        "    0     0    0  embed_tokens\n"
        "    1     1    0  layers.0\n"
        "    2     2    0  layers.1-2\n"
        "    3     3    0  layers.3\n"
        "    4     0    1  (empty)\n"
        "    5     1    1  layers.4\n"
        "    6     2    1  layers.5\n"
        "    7     3    1  layers.6-7, norm, lm_head\n"
    )
    shown = reshard(*args, "--json").json
    assert {key: shown[key] for key in shown if key != "stages"} == {
        "version": 1,
        "num_stages": 8,
        "num_ranks": 4,
        "num_virtual": 2,
        "style": "loop",
    }
    assert shown["stages"][4] == {"index": 4, "rank": 0, "virtual": 1, "modules": []}
    assert shown["stages"][7] == {
        "index": 7,
        "rank": 3,
        "virtual": 1,
        "modules": ["model.layers.6", "model.layers.7", "model.norm", "lm_head"],
    }
    assert [stage["index"] for stage in shown["stages"]] == list(range(8))


def test_256_stages_fit_on_a_screen() -> None:
    lines = reshard("layout", "pp=256", "--layers", "600").out.splitlines()
    assert lines == [
        "256 stages on 256 pipeline ranks, style loop",
        " stage    rank  vpp  modules",
        "     0       0    0  embed_tokens, layers.0-1",
        "  1-89    1-89    0  layers.2-268: 3 each",
        "90-254  90-254    0  layers.269-598: 2 each",
        "   255     255    0  layers.599, norm, lm_head",
    ]


def test_layout_is_written_as_toml_that_reads_back(tmp_path: Path) -> None:
    args = ("layout", "Ett|tt|tL", "--layers", "5")
    text = (
        'spec = "Ett|tt|tL"\nnum_ranks = 3\nstyle = "loop"\nstages = [\n'
        '    ["model.embed_tokens", "model.layers.0-1"],\n'
        '    ["model.layers.2-3"],\n    ["model.layers.4", "model.norm", "lm_head"],\n]\n'
    )
    assert reshard(*args, "--write", tmp_path / "stages.toml").code == 0
    assert (tmp_path / "stages.toml").read_text() == text
    again = reshard("layout", tmp_path / "stages.toml", "--layers", "5", "--json")
    assert again.json == reshard(*args, "--json").json


@pytest.mark.parametrize(
    ("args", "exit_code", "code"),
    [
        (("balance:params,pp=2", "--layers", "4"), 3, "layout.missing-costs"),
        (("Et*3|(tt|)*29,m|L", "--layers", "61", "--mtp", "1", "--pp", "12"), 3, "layout.indivisible-stages"),
        (("Et|((t|)*2)*1,tL", "--layers", "4"), 2, "layout.bad-group"),
    ],
)
def test_failures_are_the_same_in_text_and_in_json(args: tuple[str, ...], exit_code: int, code: str) -> None:
    ended = reshard("layout", *args, "--json")
    assert ended.refusal == (exit_code, code, "layout")
    error, printed = ended.json["error"], reshard("layout", *args)
    first, *more = error["problem"].split("\n")
    problem = "\n".join((f"error: layout: {first} [{code}]", *more))
    hint = f"\nhint: {error['hint']}" if error["hint"] else ""
    assert (printed.code, printed.out, printed.err) == (exit_code, "", f"{problem}{hint}\n")


def test_every_layout_in_the_docs_is_read(tmp_path: Path) -> None:
    table = DOCS.read_text().partition("## All forms of --layout")[2].partition("\n## ")[0]
    specs = re.findall(r"^\| `([^`]+)`", table.replace(r"\|", "|"), re.MULTILINE)
    assert len(specs) >= 11
    config = tmp_path / "config.json"
    config.write_text(json.dumps(llama_config(num_hidden_layers=30)))
    for name in ("stages.toml", "stages.json"):
        assert reshard("layout", "pp=8", "--layers", "30", "--write", tmp_path / name).code == 0
    for spec in specs:
        asked = str(tmp_path / spec) if spec.startswith("stages.") else spec
        ended = reshard("plan", config, "--layout", asked, "--seq-len", "16")
        assert (ended.code, ended.err) == (0, ""), spec
