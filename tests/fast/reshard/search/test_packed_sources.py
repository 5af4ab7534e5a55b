"""The search on what is packed already: of a manifest nothing can be dropped."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner

from bench.sparse import write_sparse
from reshard.report.search_table import launch_command, pack_command
from reshard.search.search import Choice, SearchResult, find_layouts
from runner.commands import cli
from tests.builders import pack, run
from tests.fast.reshard.formats.test_open import write_description, write_own
from tests.fast.reshard.search.test_search import CONFIGS, request


def packed_and_launched(result: SearchResult, choice: Choice) -> list[str]:
    """Run the commands that are printed for a layout, the launch as a dry run, and return its words."""
    run(*shlex.split(pack_command(result, choice))[1:], "--force")
    launch = ["synthetic" if word == "PATH" else word for word in shlex.split(launch_command(result, choice))[1:]]
    begin = launch.index("--")
    done = CliRunner().invoke(cli, [*launch[:begin], "--dry-run", *launch[begin:]])
    assert done.exception is None, (launch, done.exception, done.output)
    return launch


@pytest.mark.parametrize("depth", [1, 2])
def test_mtp_layers_of_a_packed_model_stay_and_are_counted(
    depth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = json.loads((CONFIGS / "tiny-deepseek-v3.json").read_text())
    config |= {"num_nextn_predict_layers": depth, "vocab_size": 4096}  # logits are most of the memory
    write_sparse(tmp_path / "model", config, 1)
    pack("model", "packed", "pp=1")
    result = find_layouts("packed", request(8, 1, 32))
    assert result.best
    for choice in result.best:
        launch = packed_and_launched(result, choice)
        stages = json.loads(Path(launch[1], "manifest.json").read_text())["stages"]
        assert f"model.layers.{3 + depth}" in [module for stage in stages for module in stage["modules"]]
        planned = run("plan", launch[1], *launch[launch.index("synthetic") + 1 :], "--json").json
        assert max(rank["memory_nbytes"]["total"] for rank in planned["ranks"]) == choice.forecast.memory


def test_mtp_layers_that_no_launch_trains_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    info = tmp_path / "mine-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[runner.families]\nMyForCausalLM = mine:family\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    write_own(tmp_path / "model", num_hidden_layers=3, extra=1)
    description = write_description(tmp_path / "model.toml", mtp="extra")
    packed = pack(tmp_path / "model", tmp_path / "packed", "pp=1", "--model", description)
    result = find_layouts(packed, request(2, 1, 8))
    assert not result.choices
    assert any(refusal.startswith("manifest: ") for refusal in result.refusals)
