"""Programs that serve models find and read a packed folder as it is. `make test-interop` gets them."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from manifests.index import is_consulted
from tests.builders import reshard
from tests.fast.trained import write_trained

HOME = Path(__file__).parents[2] / ".venv-interop"
HERE = Path(__file__).parent
INDEX = "model.safetensors.index.json"
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]


def part_of_interop(name: str) -> Path:
    """Return where one of the programs is, or skip the test."""
    if not (HOME / name).exists():
        pytest.skip(f"{name} is not in .venv-interop: run make test-interop, with a package index that has it")
    return HOME / name


def pack(place: Path, *, tied: bool) -> Path:
    """Return a packed model of several shards a stage."""
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=tied, max_position_embeddings=64,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(place / "source")
    args = ("--layout", "pp=3", "--max-shard-size", "20KB", "--out", place / "packed")
    assert reshard("pack", place / "source", *args).code == 0
    return place / "packed"


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return packed models, and a training checkpoint with optimizer state, tied over two stages."""
    place = tmp_path_factory.mktemp("interop")
    trained = write_trained(place, "pp=2", tie_word_embeddings=True)
    return {"untied": pack(place / "untied", tied=False), "tied": pack(place / "tied", tied=True), "trained": trained}


def weights_of(folder: Path) -> dict[str, torch.Tensor]:
    found = {}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            found |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    return found


def functions_in(path: Path, names: set[str], namespace: dict[str, Any]) -> dict[str, Any]:
    """Run the definitions of these functions alone, methods included: importing their file needs CUDA."""
    tree = ast.parse(path.read_text())
    found = [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) and node.name in names]
    first = {node.name: node for node in reversed(found)}
    assert first.keys() == names
    for node in first.values():
        node.decorator_list = []
    head = ast.parse("from __future__ import annotations\nimport fnmatch, glob, json, os").body
    exec(compile(ast.Module([*head, *first.values()], []), str(path), "exec"), namespace)
    return namespace


KINDS = (
    "json safetensors bin txt model jinja py pt pth h5 msgpack ckpt spm tiktoken tokenizer vocab pkl gguf npz codes"
    " onnx ot yaml yml pb bpe faiss so tensors"
)
# The packages that open a model's folder; the others of vLLM and SGLang are servers, kernels, caches and benchmarks.
PARTS = {
    "vllm": "config lora model_executor/model_loader model_executor/models models tokenizers transformers_utils",
    "sglang": "srt/arg_groups srt/configs srt/lora srt/model_loader srt/models srt/parser srt/speculative srt/utils",
    "peft": ".",
}
# In folders that modules.json names (which is consulted itself), that a constant names, and of options of programs.
ELSEWHERE = {
    "{}/config.json", "{folder}/config.json", "{_DSPARK_DRAFT_SUBFOLDER}/config.json",
    "{self.tensorizer_dir}/model.tensors", "{out_dir}/{libname}.so",
}  # fmt: skip


@pytest.mark.parametrize("name", PARTS)
def test_every_file_name_in_the_sources_of_readers_is_consulted(name: str) -> None:
    pattern = re.compile(rf"""(?<=["'])[A-Za-z0-9_{{*][\w.{{}}*/-]*\.(?:{KINDS.replace(" ", "|")})(?=["'])""")
    paths = [path for part in PARTS[name].split() for path in (part_of_interop(name) / name / part).rglob("*.py")]
    assert len(paths) > 100
    names = {match for path in paths for match in pattern.findall(path.read_text())}
    assert {each for each in names if not is_consulted(each)} - ELSEWHERE == set()


ADAPT = """
import sys
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
read = lambda: AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)(torch.arange(12)[None]).logits
before = read()
config = LoraConfig(target_modules=["q_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
get_peft_model(AutoModelForCausalLM.from_pretrained(sys.argv[1]), config).save_pretrained(sys.argv[1])
assert not torch.equal(before, read())
"""


def test_adapter_that_peft_writes_beside_a_packed_model_changes_its_logits_and_is_refused(tmp_path: Path) -> None:
    packed = pack(tmp_path, tied=False)
    before = {path.name for path in packed.iterdir()}
    paths = ":".join(str(part_of_interop(name)) for name in ("peft", "accelerate"))
    subprocess.run(
        [sys.executable, "-P", "-c", ADAPT, packed], check=True, timeout=200, env={**os.environ, "PYTHONPATH": paths}
    )
    added = {path.name for path in packed.iterdir()} - before
    assert {"adapter_config.json", "adapter_model.safetensors"} <= added
    for verb, key in (("verify", "differences"), ("check", "problems")):
        ended = reshard(verb, packed, "--json")
        found = {Path(difference["where"]).name for difference in ended.json[key]}
        assert (ended.code, found) == (4, added - {"README.md"})


def vllm_files(place: Path) -> Callable[[Path], list[str]]:
    loader = place / "vllm" / "model_executor" / "model_loader"
    namespace: dict[str, Any] = {
        "SAFE_WEIGHTS_INDEX_NAME": INDEX,
        "maybe_download_from_modelscope": lambda name, revision: None,
        "list_filtered_repo_files": lambda model_name_or_path, allow_patterns, revision: [
            str(path) for pattern in allow_patterns for path in Path(model_name_or_path).glob(pattern)
        ],
    }
    filters = {"filter_duplicate_safetensors_files", "filter_files_not_needed_for_inference"}
    functions_in(loader / "weight_utils.py", filters, namespace)
    functions_in(loader / "default_loader.py", {"_prepare_weights"}, namespace)
    this = SimpleNamespace(load_config=SimpleNamespace(load_format="auto"))
    return lambda folder: namespace["_prepare_weights"](this, str(folder), None, None, True, None)[1]


def sglang_files(place: Path) -> Callable[[Path], list[str]]:
    loader = place / "sglang" / "srt" / "model_loader"
    formats = ("AUTO", "SAFETENSORS", "FASTSAFETENSORS", "INSTANTTENSOR", "MISTRAL", "PT", "NPCACHE", "DUMMY")
    namespace: dict[str, Any] = {
        "SAFE_WEIGHTS_INDEX_NAME": INDEX,
        "LoadFormat": SimpleNamespace(**{name: name for name in formats}),
        "get_server_args": lambda: None,
        "envs": SimpleNamespace(SGLANG_SORT_WEIGHT_FILES=SimpleNamespace(get=lambda: 0)),
    }
    functions_in(loader / "weight_utils.py", {"filter_duplicate_safetensors_files"}, namespace)
    functions_in(loader / "loader.py", {"_prepare_weights"}, namespace)
    this = SimpleNamespace(
        load_config=SimpleNamespace(load_format="AUTO"), _maybe_download_from_modelscope=lambda name, revision: name
    )
    return lambda folder: namespace["_prepare_weights"](this, str(folder), None, True)[1]


@pytest.mark.parametrize("kind", ["untied", "tied", "trained"])
@pytest.mark.parametrize(("name", "finds"), [("vllm", vllm_files), ("sglang", sglang_files)])
def test_servers_find_the_shards_of_the_model_and_nothing_else(
    name: str, finds: Callable[[Path], Callable[[Path], list[str]]], kind: str, folders: dict[str, Path]
) -> None:
    folder = folders[kind]
    find = finds(part_of_interop(name))
    assert sorted(find(folder)) == sorted(map(str, folder.glob("model-*.safetensors")))
    assert len(find(folder)) > 1


@pytest.mark.parametrize("kind", ["untied", "tied", "trained"])
def test_converter_of_llama_cpp_reads_every_tensor_of_the_model(
    kind: str, folders: dict[str, Path], tmp_path: Path
) -> None:
    folder = folders[kind]
    place = part_of_interop("llama.cpp")
    command = [sys.executable, HERE / "read_llama_cpp.py", place, folder, tmp_path / "found.npz"]
    subprocess.run(command, check=True, timeout=200)
    found, expected = np.load(tmp_path / "found.npz"), weights_of(folder)
    assert set(found) == expected.keys()
    assert all(np.array_equal(found[name], expected[name].float().numpy()) for name in expected)


@pytest.mark.parametrize("kind", ["untied", "tied"])
def test_mlx_lm_computes_the_logits_of_transformers(kind: str, folders: dict[str, Path], tmp_path: Path) -> None:
    packed = folders[kind]
    part_of_interop("mlx")
    command = [HOME / "bin" / "python", HERE / "read_mlx.py", packed, tmp_path / "found.npy"]
    subprocess.run(command, check=True, timeout=200)
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(packed)(torch.arange(12)[None]).logits.numpy()
    np.testing.assert_allclose(np.load(tmp_path / "found.npy"), expected, rtol=0, atol=2e-6)


def test_folder_in_the_form_of_older_writers_is_not_found(folders: dict[str, Path], tmp_path: Path) -> None:
    find = vllm_files(part_of_interop("vllm"))
    (tmp_path / "stage-000").mkdir()
    (tmp_path / "stage-000" / "model.safetensors").write_bytes(next(folders["tied"].glob("*.safetensors")).read_bytes())
    with pytest.raises(RuntimeError):
        find(tmp_path)
