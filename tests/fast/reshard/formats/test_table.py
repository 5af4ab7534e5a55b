"""A new format is a folder and a row of the table: `plan`, `check`, `inspect`, `pack` and `export` then have it."""

from __future__ import annotations

import ast
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.models import model_shape
from reshard.formats import table
from reshard.formats.open import find_format
from reshard.formats.table import ExportTarget, Format
from tests.builders import (
    DTYPE_BITS,
    HEAD,
    Tensor,
    llama_config,
    llama_shapes,
    pack,
    random_tensors,
    read_safetensors,
    refusal,
    reshard,
    run,
    write_model,
)

CONFIG = llama_config()
NPY = "tests.fast.reshard.formats.npy_folder"


@pytest.fixture
def packed(tmp_path: Path) -> Path:
    write_model(tmp_path / "source", CONFIG, random_tensors(CONFIG, dtypes=("F32",)))
    run("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "packed")
    return tmp_path / "packed"


@pytest.fixture
def row(monkeypatch: pytest.MonkeyPatch) -> None:
    npy = Format(
        name="npy",
        is_in=lambda names: any(name.endswith(".npy") for name in names),
        read=f"{NPY}.read",
        write=f"{NPY}.write",
        listing=f"{NPY}.read",
        targets=(ExportTarget(to="npy", reader="NumPy: {out}"),),
    )
    monkeypatch.setattr(table, "FORMATS", (*table.FORMATS, npy))
    for name in ("reshard.cli.pack", "reshard.cli.command"):  # the choices of --to are made on import
        monkeypatch.delitem(sys.modules, name, raising=False)


def test_calls_that_notes_of_an_export_suggest_are_python() -> None:
    notes = {note for _, target in table.export_targets().values() for note in target.notes.values()}
    calls = sorted(note.removeprefix("next: ").split(", with ")[0] for note in notes if "engine." in note)
    assert [type(ast.parse(call, mode="eval").body) for call in calls] == [ast.Call, ast.Call]


@pytest.mark.usefixtures("row")
def test_every_verb_has_a_format_of_the_table(packed: Path, tmp_path: Path) -> None:
    exported, again = tmp_path / "exported", tmp_path / "again"
    assert f"for NumPy: {exported}" in run("export", packed, "--to", "npy", "--out", exported).out
    shapes = {path.stem: np.load(path).shape for path in exported.glob("*.npy")}
    assert shapes == llama_shapes(CONFIG)
    planned = run("plan", exported, "--layout", "pp=4", "--json").json
    assert sum(stage["nbytes"] for stage in planned["stages"]) == sum(4 * np.prod(dims) for dims in shapes.values())
    checked = run("check", exported, "--values", "--against", packed, "--bytes", "--json").json
    assert (checked["kind"], checked["num_tensors"], checked["problems"]) == ("npy", len(shapes), [])
    listed = run("inspect", exported, "--tensors", "--json").json
    assert (listed["format"], {item["name"] for item in listed["tensors"]}) == ("npy", set(shapes))
    run("pack", exported, "--layout", "pp=2", "--out", again)
    run("verify", again, "--against", tmp_path / "source")
    (exported / "model.norm.weight.npy").unlink()
    refused = reshard("check", exported, "--json").json["problems"]
    assert [finding["code"] for finding in refused] == ["source.missing-tensor"]


def test_bare_config_and_a_manifest_that_is_missing_are_refused_by_what_they_lack(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    assert refusal("plan", tmp_path / "model" / "config.json").found == (2, "usage.arguments", "--layout")
    missing = tmp_path / "none" / "manifest.json"
    assert refusal("check", missing).found[:2] == (3, "manifest.no-such-folder")


@pytest.mark.parametrize("to", ["dcp", "deepspeed", "megatron"])
def test_dtypes_that_torch_does_not_save_are_refused(to: str, tmp_path: Path) -> None:
    tensors = random_tensors(llama_config()) | {HEAD: Tensor(dtype="F4", shape=(40, 16), data=bytes(320))}
    write_model(tmp_path / "model", tensors=tensors)
    packed, out = pack(tmp_path / "model", tmp_path / "packed"), tmp_path / "out"
    assert refusal("export", packed, "--to", to, "--out", out).found[:2] == (2, "options.array-dtype")
    assert not out.exists()


def test_torch_shards_beside_a_stray_metadata_file_are_a_hugging_face_folder(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    (tmp_path / "model" / ".metadata").write_bytes(b"x")
    assert find_format(str(tmp_path / "model"))[0].name == "huggingface"
    (tmp_path / "model" / "model.safetensors").rename(tmp_path / "model" / "pytorch_model.bin")
    assert find_format(str(tmp_path / "model"))[0].name == "huggingface"


Config = dict[str, Any]
ARCHITECTURES = {
    "llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3", "mistral": "Mistral", "qwen3_moe": "Qwen3Moe",
    "gpt_oss": "GptOss", "deepseek_v3": "DeepseekV3",
}  # fmt: skip
TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@st.composite
def configs(draw: st.DrawFn, families: tuple[str, ...], *, biased: bool) -> Config:
    """Draw the config of a tiny model of one of these families."""
    family = draw(st.sampled_from(families))
    config = {
        "architectures": [f"{ARCHITECTURES[family]}ForCausalLM"],
        "model_type": family,
        "hidden_size": 8 * draw(st.integers(1, 3)),
        "intermediate_size": 8 * draw(st.integers(1, 3)),
        "num_hidden_layers": draw(st.integers(1, 3)),
        "num_attention_heads": 4,
        "num_key_value_heads": draw(st.sampled_from([1, 2, 4])),
        "head_dim": 2 * draw(st.integers(1, 3)),
        "vocab_size": draw(st.integers(1, 20)),
        "tie_word_embeddings": draw(st.booleans()),
    }
    if family == "llama" and biased:
        config |= {"attention_bias": draw(st.booleans()), "mlp_bias": draw(st.booleans())}
    if family == "qwen3_moe":
        config |= {"num_experts": draw(st.integers(2, 3)), "num_experts_per_tok": 1, "moe_intermediate_size": 8}
    if family == "gpt_oss":
        config |= {"num_local_experts": draw(st.integers(2, 3)), "num_experts_per_tok": 1}
    if family == "deepseek_v3":
        ranks = {"q_lora_rank": draw(st.sampled_from([None, 4])), "kv_lora_rank": 4, "v_head_dim": 6}
        config |= {
            **ranks,
            "qk_nope_head_dim": 4,
            "qk_rope_head_dim": 2,
            "num_key_value_heads": 4,
            "n_shared_experts": 2,
        }
        config |= {"n_routed_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 8, "n_group": 1}
        config |= {"topk_group": 1, "first_k_dense_replace": draw(st.integers(0, 3))}
        config["num_nextn_predict_layers"] = draw(st.integers(0, 2))
    if family == "qwen2":
        config["head_dim"] = config["hidden_size"] // 4
    return config


def tensors_of(config: Config, dtype: str, seed: int) -> dict[str, Tensor]:
    """Return random bits for each tensor that the model's files have: infinities and NaN too."""
    noise, found = random.Random(seed), dict[str, Tensor]()
    shape = model_shape(config)
    replicas = {fqn for group in shape.ties for fqn in group[1:]}
    for fqn, sizes in shape.tensors.items():
        if fqn not in replicas:
            nbytes = torch.Size(sizes).numel() * DTYPE_BITS[dtype] // 8
            found[fqn] = Tensor(dtype=dtype, shape=tuple(sizes), data=noise.randbytes(nbytes))
    for fqn in found:  # MTP layers have copies of the model's
        if fqn.endswith((".embed_tokens.weight", ".shared_head.head.weight")):
            owner = "model.embed_tokens.weight" if "embed" in fqn or shape.ties else "lm_head.weight"
            found[fqn] = found[owner]
    return found


def by_torch(place: Path, tensors: Mapping[str, Tensor]) -> Path:
    """Return a folder of `pytorch_model.bin` that torch wrote."""
    folder = place / "there"
    folder.mkdir()
    (folder / "config.json").write_bytes((place / "source" / "config.json").read_bytes())
    state = {
        fqn: torch.frombuffer(bytearray(one.data), dtype=TORCH_DTYPES[one.dtype]).view(one.shape)
        for fqn, one in tensors.items()
    }
    torch.save(state, folder / "pytorch_model.bin")
    return folder


def by_export(*flags: str) -> Callable[[Path, Mapping[str, Tensor]], Path]:
    """Return a way that packs the folder and exports the pack."""

    def export(place: Path, tensors: Mapping[str, Tensor]) -> Path:
        pack(place / "source", place / "first")
        run("export", place / "first", *flags, "--out", place / "there")
        return place / "there"

    return export


ALL = tuple(ARCHITECTURES)
OF_PARAMETERS = tuple(family for family in ALL if family != "deepseek_v3")  # whose router's bias is not trained
NAMED = ("llama", "qwen3", "qwen3_moe")  # whose tensors torchtitan and Megatron-Core call otherwise
# The way there, the families that have one, whether they may have biases, and the dtypes.
WAYS: dict[str, tuple[Callable[[Path, Mapping[str, Tensor]], Path], tuple[str, ...], bool, str]] = {
    "bin": (by_torch, ALL, True, "F32 BF16 F16"),
    "dcp": (by_export("--to", "dcp"), ALL, True, "F32 BF16 F16"),
    "torchtitan": (by_export("--to", "dcp", "--for", "torchtitan"), (*NAMED, "gpt_oss"), False, "F32 BF16"),
    "megatron": (by_export("--to", "megatron"), (*NAMED, "deepseek_v3"), False, "F32 BF16"),
    "deepspeed": (by_export("--to", "deepspeed"), ALL, True, "F32 BF16 F16"),
    "universal": (by_export("--to", "universal"), OF_PARAMETERS, True, "F32"),
    "pipeline": (by_export("--to", "universal", "--for", "pipeline"), OF_PARAMETERS, True, "F32"),
}


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=3, deadline=None)
@given(data=st.data())
def test_a_model_comes_back_with_every_bit(way: str, data: st.DataObject) -> None:
    go, families, biased, dtypes = WAYS[way]
    config = data.draw(configs(families, biased=biased))
    tensors = tensors_of(config, data.draw(st.sampled_from(dtypes.split())), data.draw(st.integers(0, 99)))
    with TemporaryDirectory() as temporary:
        place = Path(temporary)
        write_model(place / "source", config, tensors)
        there = go(place, tensors)
        pack(there, place / "again", "pp=1")
        run("export", place / "again", "--to", "hf", "--out", place / "back")
        found = read_safetensors((place / "back" / "model.safetensors").read_bytes())
        for owner, *replicas in model_shape(config).ties:  # torchtitan has a tied head as well
            assert all(found.pop(fqn, tensors[owner]) == tensors[owner] for fqn in replicas)
        assert found == tensors
