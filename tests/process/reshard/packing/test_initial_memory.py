"""A model of a billion parameters from its config: the same digests on every layout, in bounded memory."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.builders import llama_config, pack, run

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
MOST_NBYTES = 200 << 20  # beyond the largest tensor, and what transformers' import and the model on meta take
CONFIG = llama_config(
    hidden_size=2048, intermediate_size=8192, num_hidden_layers=16, num_attention_heads=32, num_key_value_heads=8,
    vocab_size=128256, tie_word_embeddings=True, dtype="bfloat16",
)  # fmt: skip
LARGEST_NBYTES = 2 * 128256 * 2048
# Prints the most memory that it ever had in use; getrusage would count the process that it was forked from.
MEASURED = """
import runpy, sys
sys.argv = sys.argv[1:]
runpy.run_module("reshard.estimate.meta_model", run_name="__main__")
print(open("/proc/self/status").read().partition("VmHWM:")[2].split()[0])
"""


def peak_nbytes(document: object, *words: str) -> int:
    command = [sys.executable, "-c", MEASURED, "meta_model", "LlamaForCausalLM", *words]
    done = subprocess.run(command, cwd=ROOT, input=json.dumps(document), capture_output=True, text=True, timeout=900)
    *_, answer, nbytes = done.stdout.splitlines()
    assert "tensors" in json.loads(answer), answer
    return 1024 * int(nbytes)


@pytest.mark.timeout(3000)
def test_a_billion_parameters_have_the_same_digests_at_1_and_4_stages(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    one, four = (
        pack(tmp_path / "config.json", tmp_path / layout, layout, "--init", "1") for layout in ("pp=1", "pp=4")
    )
    assert run("diff", one, four, "--json").json["equal"]
    shutil.rmtree(one)
    names = json.loads((four / "model.safetensors.index.json").read_text())["weight_map"]
    (tmp_path / "out").mkdir()
    base = peak_nbytes(CONFIG)
    document = {"config": CONFIG, "names": sorted(names), "parent": os.getpid()}
    peak = peak_nbytes(document, str(tmp_path / "out"), "bfloat16", "1")
    assert peak < base + LARGEST_NBYTES + MOST_NBYTES, (base, peak)
