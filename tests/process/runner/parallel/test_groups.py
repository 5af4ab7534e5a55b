"""Groups that a step uses first when its schedule has ended are connected before it: NCCL takes memory for each."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.runner.tiny import save_model
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(300)

ARGS = ("--no-self-check", "--seq-len", "32", "--global-batch", "8", "--microbatch", "1")
SHARDED_COPIES = ("--dp-replicate", "2", "--dp-shard", "2")
# By name: the model, its stages, the flags, and how many groups are used after the schedule.
CASES = {
    "tied": ("llama", 2, ("--dp-replicate", "2"), 4),  # of the stage, its copies, the pipeline and the tie
    "whole": ("llama", 1, (*SHARDED_COPIES, "--optimizer", "muon"), 5),  # and of shards; of ranks that step matrices
    "experts": ("moe", 1, (*SHARDED_COPIES, "--ep", "2"), 5),  # and of the copies of experts
}


def test_groups_of_a_step_are_connected_before_its_schedule_ends(tmp_path: Path) -> None:
    save_model(tmp_path / "llama", num_hidden_layers=2, vocab_size=VOCAB_SIZE, tie_word_embeddings=True)
    save_tiny(tmp_path / "moe", "Qwen3MoeForCausalLM", vocab_size=VOCAB_SIZE, num_hidden_layers=1)
    jobs = []
    for name, (model, num_stages, flags, _) in CASES.items():
        root = pack(tmp_path / model, tmp_path / name, f"pp={num_stages}")
        jobs.append({"name": name, "root": str(root), "args": [*ARGS, *flags]})
    (tmp_path / "cases.json").write_text(json.dumps(jobs))
    launch(4, "runner/parallel/groups_worker.py", tmp_path / "cases.json", tmp_path, timeout_s=250)
    for name, (*_, num_groups) in CASES.items():
        for rank in range(4):
            before, after = (set(groups) for groups in json.loads((tmp_path / f"{name}-{rank}.json").read_text()))
            assert after - before == set(), name
            assert len(after) == num_groups, (name, after)
