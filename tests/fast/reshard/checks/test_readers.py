"""What other programs read of a packed folder, without an export."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch.distributed.checkpoint import HuggingFaceStorageReader
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from tests.builders import HEAD, reshard
from tests.fast.sliced import CUTS, cut_up
from tests.fast.trained import write_trained

NO_RANKS = "ignore:torch.distributed is (disabled|unavailable)"
LAYOUTS = ("pp=1", "pp=3", "pp=2,vpp=2")


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def source(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=40, tie_word_embeddings=request.param, max_position_embeddings=64,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("readers") / "source"
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


@pytest.fixture(params=LAYOUTS)
def packed(request: pytest.FixtureRequest, source: Path, tmp_path: Path) -> Path:
    out = tmp_path / "packed"
    args = ("--layout", request.param, "--max-shard-size", "3KB", "--out", out)
    assert reshard("pack", source, *args).code == 0
    return out


def logits_of(folder: Path) -> tuple[torch.Tensor, dict[str, Any], bool]:
    """Return a model's logits, what transformers found wrong as it loaded it, and whether its head is tied."""
    model, info = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    with torch.no_grad():
        logits = model(torch.arange(12)[None]).logits
    return logits, info, model.lm_head.weight is model.model.embed_tokens.weight


def test_transformers_loads_the_same_model(source: Path, packed: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "transformers"):
        found, info, is_tied = logits_of(packed)
    expected, of_source, was_tied = logits_of(source)
    assert torch.equal(found, expected)
    assert (info, is_tied) == (of_source, was_tied)
    assert not any(info.values())
    assert caplog.messages == []


def test_safetensors_opens_every_shard(source: Path, packed: Path) -> None:
    found = {}
    for path in packed.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            for fqn in file.keys():  # noqa: SIM118
                assert fqn not in found
                found[fqn] = file.get_tensor(fqn)
    with safe_open(source / "model.safetensors", "pt") as file:
        expected = {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


@pytest.mark.filterwarnings(NO_RANKS)
def test_torchs_reader_of_hugging_face_folders_reads_every_tensor(source: Path, packed: Path) -> None:
    with safe_open(source / "model.safetensors", "pt") as file:
        expected = {fqn: file.get_tensor(fqn) for fqn in file.keys()}  # noqa: SIM118
    reader = HuggingFaceStorageReader(str(packed))
    assert reader.read_metadata().state_dict_metadata.keys() == expected.keys()
    found = {fqn: torch.full_like(tensor, torch.nan) for fqn, tensor in expected.items()}
    dcp.load(found, storage_reader=HuggingFaceStorageReader(str(packed)))
    assert all(torch.equal(found[fqn], tensor) for fqn, tensor in expected.items())


def test_optimizer_state_and_replicas_are_where_readers_of_the_root_do_not_look(tmp_path: Path) -> None:
    trained = write_trained(tmp_path, "pp=2", tie_word_embeddings=True)
    names = HuggingFaceStorageReader(str(trained)).read_metadata().state_dict_metadata.keys()
    assert HEAD not in names
    config = LlamaConfig.from_pretrained(trained)
    assert names == LlamaForCausalLM(config).state_dict().keys() - {HEAD}


def test_slices_are_not_taken_for_a_model(tmp_path: Path) -> None:
    sliced = write_trained(tmp_path, "pp=2")
    cut_up(sliced, CUTS["rows"])
    with pytest.raises(OSError, match="no file named"):
        AutoModelForCausalLM.from_pretrained(sliced)
    assert HuggingFaceStorageReader(str(sliced)).read_metadata().state_dict_metadata == {}
