"""Initial weights of `pack --init`, against models that transformers initializes whole."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file
from transformers.core_model_loading import revert_weight_conversion

from manifests.errors import InputError
from reshard.estimate.meta_model import InitialWeights, build, initialize, write_initial
from reshard.packing.initialize import initial_model
from reshard.packing.options import PackOptions
from reshard.packing.pack import prepare_pack
from reshard.packing.plan import LayoutRequest
from stores.folders.publish import scratch_beside
from stores.local import LocalFile
from tests.builders import INDEX, llama_config, refusal, run
from tests.fast.manifests.models.catalogued import config_of, quiet

CONFIGS = Path(__file__).parents[3] / "data" / "configs"
FEW = ("tiny-llama", "tiny-gpt2", "tiny-gpt-oss", "tiny-deepseek-v3", "JambaForCausalLM")
OTHERS = sorted({path.stem for path in CONFIGS.glob("tiny-*.json")}.difference(FEW))
CATALOGUED = ("BloomForCausalLM", "KimiLinearForCausalLM", "Qwen3NextForCausalLM")


@pytest.fixture(autouse=True)
def _same_torch() -> Iterator[None]:
    dtype = torch.get_default_dtype()
    with torch.random.fork_rng(), quiet():
        yield
    torch.set_default_dtype(dtype)


def config_named(name: str) -> dict[str, Any]:
    path = CONFIGS / f"{name}.json"
    if path.is_file():
        config: dict[str, Any] = json.loads(path.read_text())
        return config
    return {**config_of(name).to_dict(), "architectures": [name], "dtype": None}


def initialized(config: Mapping[str, Any], folder: Path, *, seed: int, dtype: str = "float32") -> dict[str, Any]:
    architecture = config["architectures"][0]
    folder.mkdir()
    names = build(architecture, config)[1]
    digests = initialize(architecture, config, names, InitialWeights(folder=folder, dtype=dtype, seed=seed))
    assert digests.keys() == names.keys()
    shards = sorted({*json.loads((folder / INDEX).read_text())["weight_map"].values()})
    return {name: tensor for shard in shards for name, tensor in load_file(folder / shard).items()}


def whole(config: Mapping[str, Any], seed: int) -> dict[str, torch.Tensor]:
    """Return the state of a model that transformers initializes, as files have it."""
    torch.manual_seed(seed)
    model_class = getattr(transformers, config["architectures"][0])
    model = model_class(model_class.config_class.from_dict({**config, "architectures": None}))
    state: dict[str, torch.Tensor] = revert_weight_conversion(model, dict(model.state_dict()))
    return state


@pytest.mark.parametrize(
    "name", [*FEW, *(pytest.param(name, marks=pytest.mark.slow) for name in (*OTHERS, *CATALOGUED))]
)
def test_tensors_are_distributed_as_those_of_transformers(name: str, tmp_path: Path) -> None:
    config = config_named(name)
    ours, theirs, others = initialized(config, tmp_path / "out", seed=1), whole(config, 2), whole(config, 3)
    assert ours.keys() <= theirs.keys()
    num_random = 0
    for fqn, tensor in ours.items():
        expected = theirs[fqn]
        assert (tensor.shape, tensor.dtype) == (expected.shape, expected.dtype), fqn
        if torch.equal(expected, others[fqn]):  # a constant
            assert torch.equal(tensor, expected), fqn
            continue
        num_random += 1
        assert not torch.equal(tensor, expected), fqn
        std, error = float(expected.std()), 6 / math.sqrt(tensor.numel())
        assert float(tensor.std()) == pytest.approx(std, rel=error), fqn
        assert float(tensor.mean() - expected.mean()) == pytest.approx(0, abs=2 * error * std), fqn
    assert num_random > len(ours) / 4


@pytest.mark.parametrize("name", ["ApertusForCausalLM", pytest.param("RwkvForCausalLM", marks=pytest.mark.slow)])
def test_models_that_transformers_initializes_as_a_whole_alone_are_refused(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config_named(name)))
    refused = refusal(
        "pack", tmp_path / "config.json", "--init", "1", "--layout", "pp=1", "--out", tmp_path / "out"
    ).found
    assert refused == (2, "options.init", "--init")
    assert not (tmp_path / "out").exists()


def test_tensors_depend_on_seed_and_name_alone(tmp_path: Path) -> None:
    config = llama_config()
    first = initialized(config, tmp_path / "first", seed=1)
    more = initialized({**config, "num_hidden_layers": 6, "vocab_size": 50}, tmp_path / "more", seed=1)
    other = initialized(config, tmp_path / "other", seed=2)
    layers = [name for name in first if "layers" in name and "norm" not in name]
    assert all(torch.equal(first[name], more[name]) for name in layers)
    assert not any(torch.equal(first[name], other[name]) for name in layers)
    shape = first[layers[0]].shape
    alike = [first[name] for name in layers if first[name].shape == shape]
    assert len({tensor.numpy().tobytes() for tensor in alike}) == len(alike)


def test_pack_initializes_a_config_in_its_dtype_with_the_tokenizer_beside_it(tmp_path: Path) -> None:
    config = llama_config(dtype="bfloat16", tie_word_embeddings=True)
    source, out = tmp_path / "config.json", tmp_path / "out"
    source.write_text(json.dumps(config))
    (tmp_path / "tokenizer.json").write_text("{}")
    run("pack", source, "--init", "7", "--layout", "pp=4", "--out", out)
    tensors = {name: value for path in out.rglob("*.safetensors") for name, value in load_file(path).items()}
    expected = initialized(config, tmp_path / "expected", seed=7, dtype="bfloat16")
    assert tensors.pop("lm_head.weight").equal(tensors["model.embed_tokens.weight"])
    assert tensors.keys() == expected.keys()
    assert all(tensor.dtype == torch.bfloat16 and tensor.equal(expected[name]) for name, tensor in tensors.items())
    assert (out / "tokenizer.json").read_text() == "{}"
    origin = json.loads((out / "manifest.json").read_text())["source"]
    assert (origin["kind"], origin["location"]) == ("init", str(source))
    assert origin["revision"].startswith("seed 7, torch ")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "expected", "out", "tokenizer.json"]


@pytest.mark.parametrize(
    ("flags", "code", "where"),
    [
        (("--virtual",), "options.conflict", "--virtual"),
        (("--drop", "lm_head"), "options.conflict", "--drop"),
        (("--dequantize", "bf16"), "options.conflict", "--dequantize"),
        (("--adapter", "nowhere"), "options.conflict", "--adapter"),
        (("--merge-slices",), "options.conflict", "--merge-slices"),
        (("--part", "1/2"), "options.conflict", "--init"),
        (("--parts", "2", "--scheduler", "slurm"), "options.conflict", "--init"),
        (("--out", "s3://bucket/x"), "options.init", "--out"),
        (("--init", "-1"), "usage.arguments", "--init"),
    ],
)
def test_what_init_does_not_support_is_refused(flags: tuple[str, ...], code: str, where: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    words = ("pack", tmp_path / "config.json", "--init", "1", "--layout", "pp=2", "--out", tmp_path / "out", *flags)
    assert refusal(*words).found[1:] == (code, where)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_model_with_weights_or_quantized_and_an_output_that_exists_are_refused(tmp_path: Path) -> None:
    source, out = tmp_path / "config.json", tmp_path / "out"
    source.write_text(json.dumps(llama_config(quantization_config={"quant_method": "fp8"})))
    words = ("--init", "1", "--layout", "pp=2", "--out", out)
    assert refusal("pack", source, *words).found[1:] == ("options.init", "--init")
    source.write_text(json.dumps(llama_config()))
    out.mkdir()
    (out / "note").write_text("mine")
    assert refusal("pack", source, *words).found[1:] == ("output.exists", str(out))
    assert refusal("pack", out, *words).found[1:] == ("options.init", "--init")
    assert refusal("pack", source, "--init", "1", "--layout", "pp=9", "--out", tmp_path / "x").found[0] == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "out"]


def test_init_is_refused_where_no_temporary_folder_can_be_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(llama_config()))
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: [str(tmp_path / "none")])
    words = ("pack", tmp_path / "config.json", "--init", "1", "--layout", "pp=2", "--out", tmp_path / "out")
    assert refusal(*words).found == (3, "output.unwritable", "TMPDIR")


def test_mtp_layers_are_refused_by_their_field(tmp_path: Path) -> None:
    source = tmp_path / "config.json"
    source.write_text(json.dumps({**config_named("tiny-deepseek-v3"), "num_nextn_predict_layers": 1}))
    done = refusal("pack", source, "--init", "1", "--layout", "pp=2", "--out", tmp_path / "out")
    assert done.found[1:] == ("config.mtp-layers", f"{source}: num_nextn_predict_layers")
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def options_for(out: Path) -> PackOptions:
    return PackOptions(out=out, layout=LayoutRequest(spec="pp=2"), init=1)


def test_second_pack_is_refused_while_another_initializes_the_same_output(tmp_path: Path) -> None:
    source, out = tmp_path / "config.json", tmp_path / "out"
    source.write_text(json.dumps(llama_config()))
    with scratch_beside(out, {"model/a"}) as (folder, _):
        (folder / "model").mkdir()
        (folder / "model" / "a").write_text("of the first")
        second = refusal("pack", source, "--init", "1", "--layout", "pp=2", "--out", out)
        assert second.found[1:] == ("output.in-use", str(out))
        assert (folder / "model" / "a").read_text() == "of the first"
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_process_that_inherited_the_lock_has_the_folder_until_it_ends(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "out", ()) as (_, lock):
        inherited = os.dup(lock)
        (folder := tmp_path / "saved").mkdir()
        os.rename(tmp_path / ".out.init", tmp_path / "saved" / ".out.init")  # as if its owner had been killed
    os.rename(folder / ".out.init", tmp_path / ".out.init")
    with pytest.raises(InputError) as refused, scratch_beside(tmp_path / "out", ()):
        pass
    assert refused.value.code == "output.in-use"
    os.close(inherited)
    with scratch_beside(tmp_path / "out", ()):
        pass
    assert not (tmp_path / ".out.init").exists()


def test_what_a_killed_pack_left_is_removed_and_files_of_others_are_refused(tmp_path: Path) -> None:
    with scratch_beside(tmp_path / "out", {"model/a"}) as (folder, _):
        (folder / "model").mkdir()
        (folder / "model" / ".a.partial").write_text("half")
        os.rename(folder, tmp_path / "left")
    os.rename(tmp_path / "left", tmp_path / ".out.init")
    with scratch_beside(tmp_path / "out", {"model/b"}) as (folder, _):
        assert [path.name for path in folder.iterdir()] == [".journal"]
    (tmp_path / ".out.init").mkdir()
    (tmp_path / ".out.init" / "mine").write_text("mine")
    with pytest.raises(InputError) as refused, scratch_beside(tmp_path / "out", {"model/b"}):
        pass
    assert refused.value.code == "output.foreign-partial"
    assert (tmp_path / ".out.init" / "mine").read_text() == "mine"


@pytest.mark.usefixtures("forked_build")
def test_shard_that_changes_after_it_is_initialized_is_not_packed(tmp_path: Path) -> None:
    source, options = tmp_path / "config.json", options_for(tmp_path / "out")
    source.write_text(json.dumps({**llama_config(), "dtype": None, "torch_dtype": "float16"}))
    with initial_model(str(source), options, lambda *_: None) as (packed, checkpoint):
        assert {tensor.dtype for tensor in checkpoint.tensors.values()} == {"F16"}
        tensor = checkpoint.tensors["model.layers.1.self_attn.q_proj.weight"]
        shard = tmp_path / ".out.init" / "model" / "model-00001.safetensors"
        with open(shard, "r+b") as file:
            file.seek(tensor.begin)
            file.write(bytes(tensor.nbytes))
        reopened = LocalFile(shard)
        tensors = {fqn: replace(tensor, file=reopened) for fqn, tensor in checkpoint.tensors.items()}
        with pytest.raises(InputError) as error:
            prepare_pack(str(source), packed, replace(checkpoint, tensors=tensors)).run()
    assert error.value.code == "shard.digest-mismatch"
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / ".out.init").exists()


ENDING = """
import os, subprocess, sys, time
from reshard.estimate.meta_model import end_with
if sys.argv[1] == "parent":
    subprocess.run([sys.executable, "-c", CODE, str(os.getpid())])
end_with(int(sys.argv[1]))
print(os.getpid(), flush=True)
time.sleep(600)
"""


@pytest.mark.usefixtures("forked_build")
def test_folder_that_cannot_be_written_is_not_a_fault_of_the_config(tmp_path: Path) -> None:
    config = llama_config()
    names = build(config["architectures"][0], config)[1]
    start = InitialWeights(folder=tmp_path / "absent", dtype="float32", seed=1)
    with pytest.raises(FileNotFoundError):
        write_initial(config, "config.json", names, start, os.open(tmp_path, os.O_RDONLY))


@pytest.mark.timeout(120)
def test_child_ends_with_a_parent_that_is_killed() -> None:
    code = f"CODE = {ENDING!r}\n{ENDING}"
    with subprocess.Popen([sys.executable, "-c", code, "parent"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        parent.kill()
        assert parent.stdout.read() == ""  # the child had it open, and has ended
    late = subprocess.run([sys.executable, "-c", code, str(child)], stdout=subprocess.PIPE, timeout=60)
    assert (late.returncode, late.stdout) == (1, b"")
