"""`--model`: architectures that no table knows, packed, resharded and exported by the modules that a file names."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from stores.open import open_manifest
from tests.builders import (
    HEAD,
    Tensor,
    files_in,
    llama_config,
    pack,
    random_tensors,
    refusal,
    reshard,
    run,
    write_model,
)
from tests.fast.reshard.forged import change_file, change_manifest

OWN = {"architectures": ["MyForCausalLM"]}
GIVEN = {
    "inputs": ["model.embed_tokens"],
    "layers": "model.layers",
    "outputs": ["model.norm", "lm_head"],
    "count": "num_hidden_layers",
}


def write_own(folder: Path, tensors: Mapping[str, Tensor] | None = None, **config: Any) -> dict[str, Tensor]:
    """Write a Llama under a name that no table has."""
    tied = config.get("tie_word_embeddings", False)
    tensors = random_tensors(llama_config(tie_word_embeddings=tied)) if tensors is None else tensors
    return write_model(folder, llama_config(**{**OWN, **config}), tensors, num_shards=2)


def write_description(path: Path, **values: object) -> Path:
    """Write a file of `--model`, in JSON's spelling of values; None leaves a key out."""
    given = {**GIVEN, **values}
    path.write_text("".join(f"{key} = {json.dumps(value)}\n" for key, value in given.items() if value is not None))
    return path


def renamed(tensors: Mapping[str, Tensor], *pairs: tuple[str, str]) -> dict[str, Tensor]:
    for old, new in pairs:
        tensors = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    return dict(tensors)


def with_two_lists(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Move the last two of four layers to a list of their own."""
    return renamed(tensors, ("model.layers.2.", "late.layers.0."), ("model.layers.3.", "late.layers.1."))


@pytest.mark.parametrize(
    ("change", "description", "config"),
    [
        (lambda tensors: tensors, {}, {}),
        (lambda tensors: tensors, {"ties": [["model.embed_tokens.weight", HEAD]]}, {"tie_word_embeddings": True}),
        (with_two_lists, {"layers": ["model.layers", "late.layers"], "count": ["early", "late"]},
         {"early": 2, "late": 2}),
        (lambda tensors: {**tensors, "scale": tensors["model.norm.weight"]},  # a parameter of the model itself
         {"inputs": ["model.embed_tokens", "scale"], "kinds": None}, {}),
    ],
    ids=["plain", "tied", "two lists", "parameter"],
)  # fmt: skip
def test_export_of_a_resharded_pack_gives_back_every_byte(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    description: dict[str, object],
    config: dict[str, Any],
    tmp_path: Path,
) -> None:
    source, packed, other, exported = (tmp_path / name for name in ("source", "packed", "other", "exported"))
    tied = bool(config.get("tie_word_embeddings"))
    write_own(source, change(random_tensors(llama_config(tie_word_embeddings=tied))), **config)
    given = write_description(tmp_path / "model.toml", **description)
    for args in (
        ("plan", source, "--layout", "pp=4", "--model", given),
        ("check", source, "--model", given),
        ("pack", source, "--layout", "pp=4", "--model", given, "--out", packed),
    ):
        run(*args)
    given.unlink()  # the manifest has it now
    for args in (
        ("verify", packed, "--against", source),
        ("pack", packed, "--layout", "pp=1", "--out", other),
        ("diff", source, other),
        ("check", other),
        ("export", other, "--to", "hf", "--out", exported),
    ):
        run(*args, "--quiet")
    assert files_in(exported) == files_in(source)
    model = open_manifest(packed).manifest.model
    assert (model.architecture, model.num_layers) == ("MyForCausalLM", 4)
    assert open_manifest(other).manifest.model == model


GUESSED = (
    (lambda tensors: tensors, {"tie_word_embeddings": True}),
    (lambda tensors: renamed(tensors, ("model.", "net."), ("layers.", "blocks."), ("embed_tokens", "wte")),
     {"num_hidden_layers": None, "depth": 4, "hidden_size": None, "d_model": 16}),
    (lambda tensors: renamed({**tensors, "head.0.weight": tensors[HEAD]}, (HEAD, "head.2.weight")), {}),
)  # fmt: skip


def test_config_without_an_architecture_is_named_by_the_file(tmp_path: Path) -> None:
    write_own(tmp_path / "source", architectures=None)
    given = write_description(tmp_path / "model.toml", architecture="Mine")
    ended = reshard("plan", tmp_path / "source", "--layout", "pp=2", "--model", given, "--json")
    assert ended.code == 0, ended.out
    ended = reshard("plan", tmp_path / "source", "--layout", "pp=2", "--model",
                    write_description(tmp_path / "other.toml"), "--json")  # fmt: skip
    assert ended.refusal[1] == "config.unsupported-architecture"


def test_number_of_thousands_of_digits_in_a_name_is_no_layer(tmp_path: Path) -> None:
    write_own(tmp_path / "source", renamed(random_tensors(llama_config()), ("layers.3.", f"layers.{'9' * 5000}.")))
    refused = refusal("plan", tmp_path / "source", "--layout", "pp=2")
    assert refused.found[:2] == (3, "config.unsupported-architecture")
    assert 'layers = "model.layers"  # 3 layers' in refused.text


@pytest.mark.parametrize(("change", "config"), GUESSED, ids=["tied", "renamed", "head of modules"])
def test_refusal_of_an_unknown_architecture_has_a_file_that_packs_it(
    change: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    config: dict[str, Any],
    tmp_path: Path,
    wording: Callable[[str], None],
) -> None:
    tied = bool(config.get("tie_word_embeddings"))
    write_own(tmp_path / "source", change(random_tensors(llama_config(tie_word_embeddings=tied))), **config)
    refused = refusal("plan", tmp_path / "source", "--layout", "pp=2")
    place = f"{tmp_path}/source/config.json: architectures"
    assert refused.found == (3, "config.unsupported-architecture", place)
    wording(refused.text)
    given = tmp_path / "model.toml"
    given.write_text(refused.text.partition("model.toml:\n")[2])
    ended = reshard("plan", tmp_path / "source", "--layout", "pp=2", "--model", given, "--json")
    assert ended.code == 0, ended.out
    assert len(ended.json["ties"]) == tied


INVALID = (
    ({"layer": "model.layers"}, "model.unknown-key", "layer"),
    ({"outputs": None}, "model.missing-key", "outputs"),
    ({"inputs": []}, "model.invalid-field", "inputs"),
    ({"inputs": "model.embed_tokens"}, "model.invalid-field", "inputs"),
    ({"tied": "yes"}, "model.invalid-field", "tied"),
    ({"ties": ["a.weight", "b.weight"]}, "model.invalid-field", "ties"),
    ({"ties": [["a.weight"]]}, "model.invalid-field", "ties[0]"),
    ({"width": 16}, "model.invalid-field", "width"),
    ({"outputs": ["model..norm"]}, "model.invalid-field", "outputs[0]"),
    ({"layers": ["a", "b"], "count": ["depth"]}, "model.invalid-field", "count"),
    ({"layers": ["a", "b"], "count": None, "mtp": "num_mtp"}, "model.invalid-field", "mtp"),
    ({"outputs": ["model.norm", "model.norm"]}, "model.overlapping-modules", "outputs[1]"),
    ({"outputs": ["model.layers.3", "lm_head"]}, "model.overlapping-modules", "outputs[0]"),
    ({"inputs": ["model"]}, "model.overlapping-modules", "layers[0]"),
    ({"outputs": ["model.norm", "head.0"]}, "model.invalid-field", "outputs[1]"),
)  # fmt: skip


@pytest.mark.parametrize(("values", "code", "key"), INVALID, ids=[f"{case[2]}-{case[1]}" for case in INVALID])
def test_invalid_file_is_refused(
    values: dict[str, object], code: str, key: str, tmp_path: Path, wording: Callable[[str], None]
) -> None:
    write_own(tmp_path / "source")
    given = write_description(tmp_path / "model.toml", **values)
    refused = refusal("pack", tmp_path / "source", "--layout", "pp=2", "--model", given, "--out", tmp_path / "out")
    assert refused.found == (3, code, f"{given}: {key}")
    assert not (tmp_path / "out").exists()
    wording(refused.text)


@pytest.mark.parametrize(
    ("content", "code"), [(None, "model.no-file"), (b"= 1", "model.not-toml"), (b"\xff", "model.not-toml"),
                          (b"#" * (1 << 20) + b"#", "model.unreadable")],
    ids=["absent", "syntax", "not text", "too large"],
)  # fmt: skip
def test_what_is_no_toml_file_is_refused(content: bytes | None, code: str, tmp_path: Path) -> None:
    write_own(tmp_path / "source")
    given = tmp_path / "model.toml"
    if content is not None:
        given.write_bytes(content)
    refused = refusal("plan", tmp_path / "source", "--layout", "pp=2", "--model", given)
    assert refused.found == (3, code, f"--model {given}")


def without_layer(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if ".layers.2." not in name}


def without_tensor(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name != "model.layers.1.mlp.up_proj.weight"}


# What each source or description gets wrong, and how it is refused, its place after the source's path.
OF_ANOTHER = {
    "module without tensors": ({"outputs": ["model.norm", "model.final", "lm_head"]}, None, {}, "model.no-tensors", ""),
    "tie without tensors": ({"ties": [["a.weight", "b.weight"]], "tied": True}, None, {"tie_word_embeddings": None},
                            "model.no-tensors", ""),
    "tied head that the config unties": ({"ties": [["model.embed_tokens.weight", HEAD]]}, None,
                                         {"tie_word_embeddings": False}, "model.untied-by-config",
                                         "/config.json: tie_word_embeddings"),
    "tensor of no module": ({"outputs": ["lm_head"]}, None, {}, "source.unknown-tensor", ""),
    "layers missing in the middle": ({}, without_layer, {}, "source.missing-tensor", ""),
    "tensor missing in a layer": ({}, without_tensor, {}, "source.missing-tensor", ""),
    "no such list": ({"layers": "model.blocks"}, None, {}, "source.missing-tensor", ""),
    "no such field": ({"count": "depth"}, None, {}, "config.invalid-field", "/config.json: depth"),
    "two lists of equal length": (None, with_two_lists, {"num_hidden_layers": 2}, "model.ambiguous-layers",
                                  "/config.json: architectures"),
    "known tensor by tensor": ({}, None, {"architectures": ["LlamaForCausalLM"]}, "model.known-architecture",
                               "/config.json: architectures"),
}  # fmt: skip


@pytest.mark.parametrize("case", OF_ANOTHER)
def test_description_of_another_model_is_refused(case: str, tmp_path: Path, wording: Callable[[str], None]) -> None:
    description, change, config, code, place = OF_ANOTHER[case]
    tensors = random_tensors(llama_config())
    write_own(tmp_path / "source", change(tensors) if change else tensors, **config)
    more = ()
    if description is not None:
        more = ("--model", write_description(tmp_path / "model.toml", **description))
    refused = refusal("pack", tmp_path / "source", "--layout", "pp=2", "--out", tmp_path / "out", *more)
    assert refused.found == (3, code, f"{tmp_path}/source{place}")
    assert not (tmp_path / "out").exists()
    wording(refused.text)


def test_folder_that_was_packed_without_its_tie_is_refused(tmp_path: Path, wording: Callable[[str], None]) -> None:
    """As versions wrote them that dropped ties of the file of --model."""
    write_own(tmp_path / "source", random_tensors(llama_config()))
    description = write_description(tmp_path / "model.toml", ties=[["model.embed_tokens.weight", HEAD]], tied=False)
    out = tmp_path / "out"
    pack(tmp_path / "source", out, "pp=2", "--model", description)
    config = json.loads((out / "config.json").read_text())
    change_file(out, "config.json", json.dumps(config | {"tie_word_embeddings": False}).encode())
    change_manifest(out, lambda document: document["model"]["description"].update(tied=True))
    for verb in (("pack", out, "--layout", "pp=1"), ("export", out, "--to", "hf")):
        refused = refusal(*verb, "--out", tmp_path / "again")
        assert refused.found == (3, "model.untied-by-config", f"{out}/config.json: tie_word_embeddings")
    wording(refused.text)


def test_index_of_another_model_and_a_catalogue_entry_that_disagrees_are_refused(
    tmp_path: Path, wording: Callable[[str], None]
) -> None:
    tensors = random_tensors(llama_config())
    other = renamed(tensors, ("model.", "transformer."), ("layers.", "h."), ("embed_tokens", "wte"))
    for name, stored in (("index", other), ("entry", tensors)):
        write_own(tmp_path / name, stored, architectures=["Olmo3ForCausalLM"])
        refused = refusal("plan", tmp_path / name, "--layout", "pp=2")
        assert refused.found == (3, "source.missing-tensor", f"{tmp_path}/{name}")
        wording(refused.text)


def test_manifest_is_not_described_a_second_time(tmp_path: Path, wording: Callable[[str], None]) -> None:
    write_own(tmp_path / "source")
    given = write_description(tmp_path / "model.toml")
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--model", given)
    for verb in (("plan", tmp_path / "out"), ("check", tmp_path / "out")):
        refused = refusal(*verb, "--model", given)
        assert refused.found == (2, "options.model-of-manifest", "--model")
        wording(refused.text)


def test_manifest_with_a_description_that_no_file_could_have_is_refused(tmp_path: Path) -> None:
    write_own(tmp_path / "source")
    given = write_description(tmp_path / "model.toml")
    pack(tmp_path / "source", tmp_path / "out", "pp=2", "--model", given)
    path = tmp_path / "out" / "manifest.json"
    document = json.loads(path.read_text())
    for key, value, code, place in (
        ("width", "a b", "manifest.inconsistent", "model.description.width"),
        ("count", [], "manifest.inconsistent", "model.description.count"),
        ("stray", 1, "manifest.unknown-field", "model.description.stray"),
    ):
        changed = json.loads(json.dumps(document))
        changed["model"]["description"][key] = value
        path.write_text(json.dumps(changed))
        assert refusal("verify", tmp_path / "out").found == (3, code, f"{path}: {place}")
