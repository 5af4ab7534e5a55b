"""The search on what is packed already: of a manifest nothing can be dropped, and a checkpoint is resumed."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
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
from tests.fast.trained import write_trained


def packed_and_launched(result: SearchResult, choice: Choice) -> list[str]:
    """Run the commands that are printed for a layout, the launch as a dry run, and return its words."""
    run(*shlex.split(pack_command(result, choice))[1:], "--force")
    launch = ["synthetic" if word == "PATH" else word for word in shlex.split(launch_command(result, choice))[1:]]
    begin, data = launch.index("--"), ["--restart-data"] if "--resume" in launch else []  # not those that it has read
    done = CliRunner().invoke(cli, [*launch[:begin], "--dry-run", *launch[begin:], *data])
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


def test_launch_of_a_training_checkpoint_resumes_it_with_what_is_planned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_trained(tmp_path, "pp=2")
    monkeypatch.chdir(tmp_path)
    new, old = (find_layouts(source, replace(request(2, 1, 16), seq_len=8)) for source in ("source", "trained"))
    assert "--resume" not in packed_and_launched(new, new.best[0])
    for choice in old.best:
        launch = packed_and_launched(old, choice)
        assert launch[launch.index("--resume") + 1] == "auto"
        # What is not given would be the checkpoint's.
        assert launch[launch.index("--microbatch") + 1] == str(choice.candidate.microbatch)
        assert launch[launch.index("--master-dtype") + 1] == {"mixed": "fp32", "bf16": "bf16"}[choice.candidate.policy]
    shown = run("plan", "trained", "--gpus", "2", "--gpu-memory", "1GB", "--seq-len", "8", "--json").json
    assert "--resume auto" in shown["launch"]
