"""Large parameters that ranks share are gathered in slices: for --save by a rank of a stage, for --publish by all."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.process.torchrun import launch

pytestmark = pytest.mark.timeout(300)

ARGS = ("--no-self-check", "--seq-len", "32", "--global-batch", "8", "--microbatch", "1")
GATHERED_NBYTES, SLICE_NBYTES, ROW_NBYTES = 200, 300, 1 << 14
CASES = {
    "shards": ("--dp-shard", "4"),
    "copies": ("--dp-replicate", "2", "--dp-shard", "2"),
    "tensor": ("--dp-shard", "2", "--tp", "2"),
    "experts": ("--dp-shard", "4", "--ep", "2"),
}


def test_large_parameters_are_gathered_in_slices_and_are_those_that_torch_gathers(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Qwen3MoeForCausalLM", vocab_size=98, num_hidden_layers=1)
    root = pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    limits = {"gathered_nbytes": GATHERED_NBYTES, "slice_nbytes": SLICE_NBYTES}
    jobs = [{"name": name, "root": str(root), "args": [*ARGS, *flags], **limits} for name, flags in CASES.items()]
    (tmp_path / "cases.json").write_text(json.dumps(jobs))
    launch(4, "runner/checkpoint/whole_worker.py", tmp_path / "cases.json", tmp_path, timeout_s=250)
    for name in CASES:
        ranks = [json.loads((tmp_path / f"{name}-{rank}.json").read_text()) for rank in range(4)]
        saved, published, slices = zip(*ranks, strict=True)
        assert saved[0], name
        assert not any(saved[1:]), name
        assert sorted(fqn for of_rank in published for fqn in of_rank) == saved[0], name
        assert 0 < max(slices) <= ROW_NBYTES, name
