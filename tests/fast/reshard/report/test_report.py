"""The output of `reshard plan`: one whole case, then properties of every model and layout."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from manifests.models import model_shape
from tests.builders import EMBEDDING, HEAD, files_in, leftovers, llama_config, pack, refusal, reshard, run, write_model
from tests.fast.manifests.models.built import DECODERS, build, perturb, read_config
from tests.fast.reshard.configs import modules_of, write_config, write_times
from tests.fast.runner.models.decoders import name_as_openai_did, save_decoder

ROOT = Path(__file__).parents[4]
CONFIGS = ROOT / "tests" / "data" / "configs"
TRUE_CONFIGS = sorted(path.stem for path in CONFIGS.glob("*.json") if not path.stem.startswith("tiny"))
PARTS = ("weights", "gradients", "optimizer", "activations", "receive_buffers", "temporary", "total")


def nbytes(*parts: int) -> dict[str, int]:
    return dict(zip(PARTS, (*parts, sum(parts)), strict=True))


def test_plan_is_the_same_in_a_table_and_in_json(tmp_path: Path, wording: Callable[[str], None]) -> None:
    # A layer has 1,952 parameters and 4,352 FLOPs per token; the embedding, on both stages, 640; the head 1,280 FLOPs.
    write_model(tmp_path, llama_config(tie_word_embeddings=True))
    flags = ("--layout", "pp=2", "--microbatches", "4", "--seq-len", "8", "--gpu-memory", "150000B")
    printed = reshard("plan", tmp_path, *flags).out
    wording(printed)
    table = [re.split(" {2,}", line.strip()) for line in printed.splitlines()[3:5]]
    assert table == [
        ["0", "0", "0", "embed_tokens, layers.0-1", "4,544", "8.88 KiB", "8.70 k", "108.38 KiB", "87%"],
        ["1", "1", "0", "layers.2-3, norm, lm_head", "4,560", "8.91 KiB", "9.98 k", "95.66 KiB", "100%"],
    ]
    shown = reshard("plan", tmp_path, *flags, "--json").json
    memory = [nbytes(18176, 18176, 36352, 33536, 1536, 3200), nbytes(18240, 18240, 36480, 20384, 2048, 2560)]
    # Stage 1 starts after one forward of stage 0 and never waits; stage 0 ends with one backward.
    step = 8704 + 12 * 9984 + 2 * 8704
    assert shown == {
        "version": 1,
        "num_stages": 2,
        "num_ranks": 2,
        "num_virtual": 1,
        "style": "loop",
        "stages": [
            {
                "index": 0,
                "rank": 0,
                "virtual": 0,
                "modules": modules_of(4)[:3],
                "params": 4544,
                "nbytes": 9088,
                "forward_flops_per_token": 8704,
                "memory_nbytes": memory[0],
                "share_of_slowest": pytest.approx(8704 / 9984),
            },
            {
                "index": 1,
                "rank": 1,
                "virtual": 0,
                "modules": modules_of(4)[3:],
                "params": 4560,
                "nbytes": 9120,
                "forward_flops_per_token": 9984,
                "memory_nbytes": memory[1],
                "share_of_slowest": 1.0,
            },
        ],
        "ranks": [
            {
                "rank": 0,
                "stages": [0],
                "memory_nbytes": memory[0],
                "share_of_slowest": pytest.approx(8704 / 9984),
                "bubble": pytest.approx(1 - 12 * 8704 / step),
            },
            {
                "rank": 1,
                "stages": [1],
                "memory_nbytes": memory[1],
                "share_of_slowest": 1.0,
                "bubble": pytest.approx(1 - 12 * 9984 / step),
            },
        ],
        "smallest_fit": None,
        "imbalance": {"stages": pytest.approx(9984 / 9344), "ranks": pytest.approx(9984 / 9344)},
        "bubble": pytest.approx(1 - 6 * (8704 + 9984) / step),
        "step_s": None,
        "assumed": {
            "schedule": "1F1B",
            "microbatch_group": None,
            "num_microbatches": 4,
            "microbatch": 1,
            "seq_len": 8,
            "dtype": "fp32",
            "master_dtype": "fp32",
            "dp_replicate": 1,
            "dp_shard": 1,
            "tp": 1,
            "cp": 1,
            "cp_method": "gather",
            "ep": 1,
            "ac": "none",
            "host_memory": None,
            "loss_chunk": None,
            "memory_limit_nbytes": 150_000,
            "times": "flops",
            "work": "exact",
            "stored_dtypes": None,
        },
        "ties": [{"owner": {"fqn": EMBEDDING, "stage": 0}, "replicas": [{"fqn": HEAD, "stage": 1}]}],
        "untied": [],
        "read_nbytes": 18208,
        "write_nbytes": 30496,
    }


@pytest.mark.parametrize("name", TRUE_CONFIGS)
def test_stages_of_a_config_alone_sum_to_the_model(name: str) -> None:
    config = CONFIGS / f"{name}.json"
    shown = reshard("plan", config, "--layout", "balance:time,pp=8", "--json").json
    shape = model_shape(json.loads(config.read_text()))
    copies = sum(shape.count_params(replica["fqn"]) for tie in shown["ties"] for replica in tie["replicas"])
    assert sum(stage["params"] for stage in shown["stages"]) == shape.num_params + copies
    assert [module for stage in shown["stages"] for module in stage["modules"]] == list(shape.modules)
    assert sum(stage["nbytes"] for stage in shown["stages"]) == shown["read_nbytes"] < shown["write_nbytes"]
    assert max(stage["share_of_slowest"] for stage in shown["stages"]) == 1.0
    assert {"BF16", "F16", "F32"} & set(shown["assumed"]["stored_dtypes"])


def test_config_alone_is_planned_as_with_its_weights(tmp_path: Path, wording: Callable[[str], None]) -> None:
    config = llama_config(torch_dtype="bfloat16")
    write_model(tmp_path / "whole", config)
    (tmp_path / "bare").mkdir()
    for bare in (tmp_path / "bare" / "config.json", tmp_path / "named.json"):
        bare.write_text(json.dumps(config))
    keys = ("stages", "ranks", "read_nbytes", "write_nbytes", "ties")
    whole, *others = (
        {key: reshard("plan", source, "--layout", "pp=2", "--json").json[key] for key in keys}
        for source in (
            tmp_path / "whole",
            tmp_path / "bare",
            tmp_path / "bare" / "config.json",
            tmp_path / "named.json",
        )
    )
    assert others == [whole] * 3
    note = reshard("plan", tmp_path / "bare", "--layout", "pp=2").out.splitlines()[-2]
    assert note.endswith("BF16")
    wording(note)


def test_quantized_config_counts_each_tensor_in_its_own_dtype(tmp_path: Path) -> None:
    config = json.loads((CONFIGS / "deepseek-v3.json").read_text())
    shown = reshard("plan", CONFIGS / "deepseek-v3.json", "--layout", "pp=16", "--json").json
    (tmp_path / "plain.json").write_text(json.dumps(config | {"quantization_config": None}))
    plain = reshard("plan", tmp_path / "plain.json", "--layout", "pp=16", "--json").json
    sizes = {fqn: prod(dims) for fqn, dims in model_shape(config).tensors.items()}
    scales = {fqn: size for fqn, size in sizes.items() if fqn.endswith("_scale_inv")}
    halved = sum(sizes[fqn.removesuffix("_scale_inv")] for fqn in scales)
    assert shown["read_nbytes"] == plain["read_nbytes"] - halved + 4 * sum(scales.values())
    assert shown["assumed"]["stored_dtypes"] == ["BF16", "F32", "F8_E4M3"]
    assert plain["assumed"]["stored_dtypes"] == ["BF16"]


def test_unknown_dtype_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    config = write_config(tmp_path / "config.json", dtype="int3")
    ended = reshard("plan", config, "--layout", "pp=2", "--json")
    assert ended.refusal == (3, "config.unknown-dtype", f"{config}: dtype")
    wording(ended.json["error"]["problem"])


def test_stages_that_are_all_different_are_omitted_in_the_middle(tmp_path: Path) -> None:
    config = write_config(tmp_path / "deep.json", num_hidden_layers=150)
    uneven = "|".join("t" * (1 + index % 2) for index in range(100))
    lines = reshard("plan", config, "--layout", f"E{uneven}L", "--seq-len", "4").out.splitlines()
    assert lines[15].split("  ")[-1] == "... 76 more rows, see --json ..."
    assert len(lines) < 40


@pytest.mark.parametrize(
    ("spec", "start"),
    [
        ("Etttt|L", "rank 0 (stage 0) "),
        ("E|tt|tt|L", "ranks 1-2 "),
        ("Et|t|t|tL", "rank 3 (stage 3) "),
        ("E|t|t|t|t|L", "no bottleneck: "),
        ("EttttL", "no bottleneck: "),
        ("balance:params,pp=2", "rank 1 (stage 1) "),
    ],
)
def test_bottleneck_is_named(spec: str, start: str, tmp_path: Path, wording: Callable[[str], None]) -> None:
    config = write_config(tmp_path / "config.json")
    lines = reshard("plan", config, "--layout", spec, "--seq-len", "8").out.splitlines()
    (line,) = [line for line in lines if "bottleneck" in line]
    assert line.startswith(start)
    wording(line)


def test_even_ranks_have_no_bottleneck_and_wait_only_for_the_pipeline(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    config = write_config(tmp_path / "config.json")
    times = write_times(tmp_path / "times.json", dict.fromkeys(modules_of(5), (0.5, 1.0)))
    write_config(config, num_hidden_layers=5)
    flags = ("--layout", "balance:time,pp=4", "--cost", times, "--microbatches", "8")
    lines = reshard("plan", config, *flags).out.splitlines()
    # Two modules per rank: a forward takes 1 s, a backward 2 s. 1F1B: M + P - 1 of both.
    wording("\n".join(line for line in lines if "bottleneck" in line or "1F1B" in line))
    shown = reshard("plan", config, *flags, "--json").json
    assert shown["step_s"] == pytest.approx(33)
    assert shown["bubble"] == pytest.approx(3 / 11)
    assert shown["assumed"]["times"] == "measured"


def test_plan_without_a_picture_imports_neither_torch_nor_matplotlib(tmp_path: Path) -> None:
    config = write_config(tmp_path / "config.json")
    code = (
        "import atexit, sys; from reshard.cli import main; "
        "atexit.register(lambda: print(*sys.modules, file=sys.stderr)); main()"
    )
    command = [sys.executable, "-c", code, "plan", str(config), "--layout", "balance:time,pp=2"]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    loaded = set(ended.stderr.split())
    assert "reshard.packing.plan" in loaded
    assert not loaded & {"torch", "numpy", "matplotlib", "transformers"}


SHARDS = "100KB"  # small enough for several files


def save(folder: Path, name: str, **changes: Any) -> None:
    perturb(build(read_config(name, **changes))).save_pretrained(folder, max_shard_size=SHARDS)


def pack_and_export(source: Path, tmp_path: Path, layout: str = "pp=3") -> dict[str, Any]:
    """Pack, reshard, export, see that every byte came back, and return the first manifest."""
    for origin, out, spec in ((source, "packed", layout), (tmp_path / "packed", "resharded", "balance:params,pp=2")):
        pack(origin, tmp_path / out, spec, "--quiet")
    run("export", tmp_path / "resharded", "--to", "hf", "--out", tmp_path / "exported", "--quiet")
    assert files_in(tmp_path / "exported") == files_in(source)
    manifest: dict[str, Any] = json.loads((tmp_path / "packed" / "manifest.json").read_text())
    return manifest


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("name", DECODERS)
def test_pack_and_export_give_every_byte_back(name: str, tied: bool, tmp_path: Path) -> None:
    source = tmp_path / "source"
    save(source, name, tie_word_embeddings=tied)
    manifest = pack_and_export(source, tmp_path)
    shape = model_shape(json.loads((source / "config.json").read_text()))
    assert [module for stage in manifest["stages"] for module in stage["modules"]] == list(shape.modules)
    assert manifest["model"]["architecture"] == shape.architecture
    assert len(manifest["ties"]) == tied


def openai_gpt2(folder: Path) -> None:
    """Write a GPT-2 as OpenAI's own files are, with the constant that old ones held beside their masks."""
    save_decoder(folder / "gpt2", "tiny-gpt2", tie_word_embeddings=True, n_positions=16)
    name_as_openai_did(folder / "gpt2")
    path = folder / "gpt2" / "model.safetensors"
    save_file({**load_file(path), "h.0.attn.masked_bias": torch.tensor(-1e4)}, path, {"format": "pt"})


def test_gpt2_without_prefix_is_packed_under_its_fqns_and_exported_as_it_was(tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    source = tmp_path / "gpt2"
    manifest = pack_and_export(source, tmp_path)
    assert manifest["stages"][0]["modules"][:3] == ["transformer.wte", "transformer.wpe", "transformer.h.0"]
    packed = load_file(tmp_path / "packed" / manifest["stages"][0]["shards"][0]["path"])
    assert {"transformer.wte.weight", "transformer.h.0.attn.bias", "transformer.h.0.attn.masked_bias"} <= packed.keys()
    run("verify", tmp_path / "packed", "--against", source)
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "exported")
    assert model.lm_head.weight is model.transformer.wte.weight


@pytest.mark.parametrize("named", ["h.2.attn.bias", "transformer.h.2.attn.bias"])
def test_tensor_without_prefix_is_dropped_by_either_name(named: str, tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    out = tmp_path / "packed"
    pack(tmp_path / "gpt2", out, "pp=2", "--drop", named)
    assert json.loads((out / "source.json").read_text())["dropped"] == ["h.2.attn.bias"]
    run("verify", out, "--against", tmp_path / "gpt2")
    assert reshard("export", out, "--to", "hf", "--out", tmp_path / "exported").code == 0
    left = load_file(tmp_path / "exported" / "model.safetensors").keys()
    assert left == load_file(tmp_path / "gpt2" / "model.safetensors").keys() - {"h.2.attn.bias"}


def test_virtual_bundles_do_not_refer_to_files_without_prefix(tmp_path: Path) -> None:
    openai_gpt2(tmp_path)
    refused = refusal("pack", tmp_path / "gpt2", "--layout", "pp=2", "--virtual", "--out", tmp_path / "packed")
    assert refused.found == (3, "options.cannot-be-virtual", "model.safetensors: 'h.0.attn.bias'")
    assert leftovers(tmp_path / "packed") == []


def test_tensor_with_and_without_prefix_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    openai_gpt2(tmp_path)
    path = tmp_path / "gpt2" / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "transformer.ln_f.weight": tensors["ln_f.weight"].clone()}, path, {"format": "pt"})
    ended = reshard("pack", tmp_path / "gpt2", "--layout", "pp=2", "--out", tmp_path / "packed", "--json")
    exit_code, code, where = ended.refusal
    assert (exit_code, code, where.split(": ")[0]) == (3, "source.tensor-twice", str(path))
    wording(ended.json["error"]["problem"])


def test_base_model_of_opt_is_packed_under_its_fqns(tmp_path: Path) -> None:
    model = build(read_config("tiny-opt", tie_word_embeddings=True))
    source = tmp_path / "source"
    model.save_pretrained(source)
    tensors = {name.removeprefix("model."): tensor for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, source / "model.safetensors", {"format": "pt"})
    assert pack_and_export(source, tmp_path)["stages"][0]["modules"][0] == "model.decoder.embed_tokens"


@pytest.mark.parametrize(
    ("name", "layout", "cuts"),
    [
        ("gpt2", "pp=2", [8]),
        ("gpt2", "pp=2,vpp=2", [5, 9, 12]),
        ("gpt2", "Et*6|t*6L --pp 2", [8]),
        ("gpt2", "balance:params,pp=2,pin=transformer.h.2@0,pin=transformer.h.3@1", [5]),
        ("gpt2", "balance:params,pp=2,pin=h.2@0,pin=h.3@1", [5]),
        ("opt-350m", "pp=4", [9, 16, 22]),
        ("opt-350m", "balance:params,pp=3,pin=layers.2@0,pin=layers.3@1,pin=layers.23@1,pin=project_out@2", [6, 27]),
        ("mpt-7b", "balance:params,pp=2,pin=blocks.30@0,pin=blocks.31@1", [32]),
        ("mixtral-8x7b", "balance:params,pp=2", [17]),
    ],
)  # fmt: skip
def test_layouts_cut_models_of_other_names(name: str, layout: str, cuts: list[int], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(read_config(name)))
    spec, *flags = layout.split(" ")
    ended = reshard("plan", tmp_path / "config.json", "--layout", spec, *flags, "--json")
    modules = model_shape(read_config(name)).modules
    bounds = [0, *cuts, len(modules)]
    assert [stage["modules"] for stage in ended.json["stages"]] == [
        list(modules[begin:end]) for begin, end in pairwise(bounds)
    ]
