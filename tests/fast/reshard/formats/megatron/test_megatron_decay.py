"""Which 1-D parameters of Megatron's optimizer have weight decay: with --apply-wd-to-qk-layernorm, norms by its names.

Source: megatron-core 0.16.1 and 0.19.0, optimizer/__init__.py.
"""

from __future__ import annotations

import json
import pickle
import re
from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch

from manifests.models import model_shape
from manifests.schema import ParameterGroup
from manifests.store import write_manifest
from stores.open import open_manifest
from tests.builders import Tensor, pack, refusal, run
from tests.fast.reshard.forged import change_manifest
from tests.fast.reshard.formats.dcp.test_dcp_source import huggingface_state
from tests.fast.trained import MOMENTS, STATE, write_moments

FLAG = "apply_wd_to_qk_layernorm"


def groups_of(packed: Path) -> tuple[ParameterGroup, ...]:
    training = open_manifest(packed).manifest.training
    assert training is not None
    assert training.optimizer is not None
    return training.optimizer.groups


def set_undecayed(packed: Path, fqns: list[str]) -> None:
    """Let these parameters have no weight decay."""
    manifest = open_manifest(packed).manifest
    assert manifest.training is not None
    assert manifest.training.optimizer is not None
    decayed = manifest.training.optimizer.groups[0]
    groups = (decayed, replace(decayed, weight_decay=0.0, fqns=tuple(sorted(fqns))))
    optimizer = replace(manifest.training.optimizer, groups=groups)
    write_manifest(packed, replace(manifest, training=replace(manifest.training, optimizer=optimizer)))


def pack_trained(kind: str, place: Path) -> tuple[Path, list[str]]:
    """Pack a model with optimizer state, and return the 1-D parameters, which have no weight decay."""
    state = huggingface_state(kind, place / "model")  # without MTP layers, which transformers does not have
    trained = model_shape(json.loads((place / "model" / "config.json").read_text())).trained
    shapes = {fqn: shape for fqn, shape in trained.items() if fqn in state}
    packed = pack(place / "model", place / "packed", "pp=1")
    moments = {fqn: Tensor(dtype="F32", shape=shape, data=bytes(4 * prod(shape))) for fqn, shape in shapes.items()}
    for moment in MOMENTS:
        write_moments(packed, 0, moment, moments)
    change_manifest(packed, lambda document: document.update(training=dict(STATE)))
    lines = [fqn for fqn, shape in shapes.items() if len(shape) == 1]
    set_undecayed(packed, lines)
    return packed, lines


def set_flag(folder: Path) -> None:
    common = torch.load(folder / "common.pt", weights_only=False)
    assert getattr(common["args"], FLAG, False) is False
    setattr(common["args"], FLAG, True)
    torch.save(common, folder / "common.pt")


def remove_entries(folder: Path, names: str) -> None:
    """Leave out of the metadata what the other of Megatron's layer specs would not have saved."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    entries = metadata.state_dict_metadata
    metadata.state_dict_metadata = {name: entry for name, entry in entries.items() if not re.search(names, name)}
    assert len(metadata.state_dict_metadata) < len(entries)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize(
    ("kind", "other_spec", "decayed"),
    [
        ("qwen3", None, (".q_norm.", ".k_norm.")),
        ("deepseek_v3", r"\.(q|kv)_layernorm\.weight$", ()),  # Transformer Engine's: linear_q_up_proj.layer_norm_weight
        ("deepseek_v3", r"\.linear_(q|kv)_up_proj\.layer_norm_weight$", (".q_a_layernorm.",)),
    ],
    ids=["qwen3", "fused latent", "latent"],
)
def test_norms_of_queries_and_keys_are_decayed_as_megatron_names_them(
    kind: str, other_spec: str | None, decayed: tuple[str, ...], tmp_path: Path
) -> None:
    packed, lines = pack_trained(kind, tmp_path)
    run("export", packed, "--to", "megatron", "--out", tmp_path / "megatron")
    iteration = tmp_path / "megatron" / "iter_0000060"
    if other_spec is not None:
        remove_entries(iteration, other_spec)
    assert set(groups_of(pack(iteration, tmp_path / "plain", "pp=1"))[1].fqns) == set(lines)
    set_flag(iteration)
    undecayed = set(groups_of(pack(iteration, tmp_path / "flagged", "pp=1"))[1].fqns)
    assert undecayed == {fqn for fqn in lines if not any(name in fqn for name in decayed)}
    assert bool(decayed) == (undecayed != set(lines))


def test_decay_of_the_norms_of_queries_and_keys_comes_and_goes(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    packed, lines = pack_trained("qwen3", tmp_path)
    others = [fqn for fqn in lines if not fqn.endswith((".q_norm.weight", ".k_norm.weight"))]
    set_undecayed(packed, others)
    run("export", packed, "--to", "megatron", "--out", tmp_path / "megatron")
    assert [record.args for record in caplog.records] == [(str(packed),)]
    iteration = tmp_path / "megatron" / "iter_0000060"
    assert getattr(torch.load(iteration / "common.pt", weights_only=False)["args"], FLAG) is True
    assert groups_of(pack(iteration, tmp_path / "again", "pp=1")) == groups_of(packed)
    set_undecayed(packed, others[1:])
    exit_code, code, _ = refusal("export", packed, "--to", "megatron", "--out", tmp_path / "no").found
    assert (exit_code, code) == (3, "checkpoint.other-optimizer")
