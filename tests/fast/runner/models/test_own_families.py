"""Families of other packages: entry points that are wrong are refused, and what is built is compared with the files."""

from __future__ import annotations

import doctest
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import runner
from manifests.errors import UserError
from manifests.models import ModelShape
from manifests.models.trainable import check_trainable, find_family
from manifests.schema import ModelDescription
from runner.config.parallel_dims import ParallelDims
from runner.models import family_for
from runner.models.family import row_inputs_of
from runner.models.own import request_of
from runner.parallel.parallelize import check_plans
from runner.pipeline.chunk import build_chunks
from runner.proof.options import check_stages
from runner.proof.stages import SelfChecked

NAME = "MineForCausalLM"
DESCRIPTION = ModelDescription(
    inputs=("embed",), layers=("layers",), outputs=("head",), count=("depth",), width="dim", tied=False,
)  # fmt: skip
SHAPE = ModelShape(
    architecture=NAME,
    num_layers=1,
    modules=("embed", "layers.0", "head"),
    tensors={"embed.weight": (8, 4), "layers.0.weight": (4, 4), "head.weight": (8, 4)},
    hidden_size=4,
)
MODULE = """
import runner
from torch import nn

def family(request):
    return runner.NamedFamily(request, lambda modules: nn.ModuleDict({"embed": nn.Embedding(8, 4)}))

def nothing(request):
    return object()

number = 1
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Return a function that installs a package with one entry point, as pip would."""
    (tmp_path / "mine_for_tests.py").write_text(MODULE)
    (tmp_path / "broken_for_tests.py").write_text("import a_package_that_nobody_has\n")
    monkeypatch.syspath_prepend(str(tmp_path))

    def add(value: str, package: str = "mine", name: str = NAME) -> None:
        info = tmp_path / f"{package}-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[runner.families]\n{name} = {value}\n")

    yield add
    for module in ("mine_for_tests", "broken_for_tests"):
        sys.modules.pop(module, None)


def load(architecture: str = NAME) -> runner.Family:
    config = {"architectures": [architecture]}
    return family_for(config, max_seq_len=8, shape=SHAPE, description=DESCRIPTION)


def test_family_of_an_installed_package_is_found_and_told_of_the_model(install: Callable[..., None]) -> None:
    install("mine_for_tests:family")
    check_trainable(NAME, is_described=True)
    found = load()
    assert (found.architecture, found.modules, found.hidden_size, found.vocab_size) == (NAME, SHAPE.modules, 4, 8)
    built = found.build(("embed",))
    assert [(name, tensor.device.type) for name, tensor in built.named_parameters()] == [("embed.weight", "meta")]
    (piece,) = found.pieces("embed.weight", torch.zeros(2, 4), (6, 0))
    assert (found.to_hf("embed.weight"), piece.fqn, piece.shape) == ("embed.weight", "embed.weight", (8, 4))


@pytest.mark.parametrize(
    ("value", "code"),
    [
        ("broken_for_tests:family", "model.family-import"),
        ("no_such_module_for_tests:family", "model.family-import"),
        ("mine_for_tests:absent", "model.family-missing"),
        ("mine_for_tests:number", "model.not-a-family"),
        ("mine_for_tests:nothing", "model.not-a-family"),
    ],
)
def test_wrong_entry_point_is_refused(
    value: str, code: str, install: Callable[..., None], wording: Callable[[str], None]
) -> None:
    install(value)
    with pytest.raises(UserError) as caught:
        load()
    assert (caught.value.code, caught.value.where) == (code, f"entry point {NAME} = {value} (runner.families)")
    wording(str(caught.value))


def test_two_families_of_one_architecture_are_refused(
    install: Callable[..., None], wording: Callable[[str], None]
) -> None:
    install("mine_for_tests:family")
    install("mine_for_tests:family", package="theirs")
    with pytest.raises(UserError) as caught:
        find_family(NAME)
    assert (caught.value.code, caught.value.where) == ("model.family-claimed-twice", "entry points runner.families")
    wording(str(caught.value))


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "Olmo3ForCausalLM"])
def test_family_for_an_architecture_that_trains_without_it_is_refused(
    architecture: str, install: Callable[..., None], wording: Callable[[str], None]
) -> None:
    check_trainable(architecture)
    install("mine_for_tests:family", name=architecture)
    with pytest.raises(UserError) as caught:
        check_trainable(architecture)
    assert (caught.value.code, caught.value.where) == ("model.family-claimed-twice", "entry points runner.families")
    wording(str(caught.value))


class Scaled(nn.Module):
    """A layer with a buffer that no file has."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 4))
        self.register_buffer("scale", torch.ones(1), persistent=False)


def request() -> runner.FamilyRequest:
    return runner.FamilyRequest(
        architecture=NAME, config={}, modules=SHAPE.modules, tensors=SHAPE.tensors, hidden_size=4, vocab_size=8,
        max_seq_len=8,
    )  # fmt: skip


@pytest.mark.parametrize(
    "layer", [nn.Linear(4, 4), nn.Linear(4, 8, bias=False), nn.Identity()], ids=["more", "shape", "fewer"]
)
def test_modules_that_differ_from_the_files_are_refused(layer: nn.Module, wording: Callable[[str], None]) -> None:
    family = runner.NamedFamily(request(), lambda modules: nn.ModuleDict({"layers": nn.ModuleDict({"0": layer})}))
    with pytest.raises(UserError) as caught:
        family.build(("layers.0",))
    assert (caught.value.code, caught.value.where) == ("model.family-mismatch", "config.json")
    wording(str(caught.value))


def test_buffers_that_no_file_has_are_computed_by_the_module_or_refused() -> None:
    family = runner.NamedFamily(request(), lambda modules: nn.ModuleDict({"layers": nn.ModuleDict({"0": Scaled()})}))
    built = family.build(("layers.0",))
    with pytest.raises(UserError) as caught:
        family.init_buffers(built, torch.device("cpu"))
    assert (caught.value.code, caught.value.where) == ("model.family-buffers", "config.json")
    told: list[torch.device] = []
    built.init_buffers = told.append  # type: ignore[assignment]
    family.init_buffers(built, torch.device("cpu"))
    assert told == [torch.device("cpu")]


def new_class(*, is_wrong: bool) -> type[Any]:
    """Return a class that no table knows; a wrong one adds the first layer's result to what the last layer reads."""
    from transformers import Olmo3Config, Olmo3ForCausalLM

    class NewConfig(Olmo3Config):  # type: ignore[misc]
        model_type = "new_model"

    class NewForCausalLM(Olmo3ForCausalLM):  # type: ignore[misc]
        config_class = NewConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            if is_wrong:
                kept: list[torch.Tensor] = []
                self.model.layers[0].register_forward_hook(
                    lambda layer, args, out: kept.__setitem__(slice(None), [out])
                )
                self.model.layers[-1].register_forward_pre_hook(lambda layer, args: (args[0] + sum(kept), *args[1:]))

    return NewForCausalLM


@pytest.mark.parametrize("is_wrong", [False, True])
def test_self_check_catches_a_class_that_its_description_does_not_describe(is_wrong: bool) -> None:
    config = {
        "architectures": ["NewForCausalLM"], "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
        "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    description = ModelDescription(
        inputs=("model.embed_tokens",), layers=("model.layers",), outputs=("model.norm", "lm_head"),
        count=("num_hidden_layers",), width="hidden_size", tied=False,
    )  # fmt: skip
    asked = replace(request(), architecture="NewForCausalLM", config=config, description=description)
    family = runner.generic_family(new_class(is_wrong=is_wrong), asked)
    assert isinstance(family, SelfChecked)
    stages = (family.modules[:3], family.modules[3:])
    if not is_wrong:
        assert check_stages(family, stages) > 0
        return
    with pytest.raises(UserError) as caught:
        check_stages(family, stages)
    assert caught.value.code == "model.self-check-failed"


def test_doctest_of_generic_family_runs() -> None:
    config = {
        "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "tie_word_embeddings": False,
    }  # fmt: skip
    asked = replace(request(), architecture="Olmo3ForCausalLM", config=config)
    globs = {"runner": runner, "request": asked, "MyForCausalLM": new_class(is_wrong=False)}
    tests = doctest.DocTestFinder().find(runner.generic_family, "generic_family", globs=globs)
    ran = [doctest.DocTestRunner().run(test) for test in tests]
    assert [(found.failed, found.attempted) for found in ran] == [(0, 4)]


class Decoder(nn.Module):
    """Some of four layers; a wrong one scales what arrives at every stage."""

    def __init__(
        self, modules: tuple[str, ...], *, width: int = 4, is_wrong: bool = False, wraps: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.wraps = bool(modules) and modules[-1] in wraps  # and returns a dict
        self.embed = nn.Embedding(8, width) if "embed" in modules else None
        own = [name.rpartition(".")[2] for name in modules if name.startswith("layers.")]
        self.layers = nn.ModuleDict({number: nn.Linear(width, width) for number in own})
        self.head = nn.Linear(width, 8, bias=False) if "head" in modules else None
        self.is_wrong = is_wrong

    def forward(self, hidden: torch.Tensor) -> Any:
        hidden = hidden if self.embed is None else self.embed(hidden)
        hidden = 2 * hidden if self.is_wrong else hidden
        for layer in self.layers.values():
            hidden = hidden + layer(hidden).tanh()
        hidden = hidden if self.head is None else self.head(hidden)
        return {"hidden": hidden} if self.wraps else hidden


def decoder_family(
    width: int, *, is_wrong: bool, has_tiny: bool = False, wraps: tuple[str, ...] = ()
) -> runner.NamedFamily:
    modules = ("embed", *(f"layers.{number}" for number in range(4)), "head")
    with torch.device("meta"):
        tensors = {name: tuple(each.shape) for name, each in Decoder(modules, width=width).state_dict().items()}
    asked = replace(request(), modules=modules, tensors=tensors, hidden_size=width)
    make = partial(Decoder, width=width, is_wrong=is_wrong, wraps=wraps)
    return runner.NamedFamily(asked, make, partial(Decoder, is_wrong=is_wrong) if has_tiny else None)


@pytest.mark.parametrize("width", [4, 8192])
def test_self_check_compares_a_named_family_in_one_stage_with_others(width: int) -> None:
    right, wrong = (decoder_family(width, is_wrong=is_wrong, has_tiny=width > 4) for is_wrong in (False, True))
    stages = (right.modules[:2], right.modules[2:4], right.modules[4:])
    assert check_stages(right, stages) > 0
    with pytest.raises(UserError) as caught:
        check_stages(wrong, stages)
    assert (caught.value.code, caught.value.where) == ("model.self-check-failed", "config.json")


@pytest.mark.parametrize("wraps", ["head", "layers.1"])
def test_a_forward_that_returns_a_dict_is_refused_by_its_class(wraps: str, wording: Callable[[str], None]) -> None:
    family = decoder_family(4, is_wrong=False, wraps=(wraps,))
    stages = (family.modules[:3], family.modules[3:])
    with pytest.raises(UserError) as caught:
        check_stages(family, stages)
    assert (caught.value.code, caught.value.where) == ("model.family-output", f"{__name__}.Decoder.forward")
    first, _ = build_chunks(family, stages, (0, 1))
    if wraps == "layers.1":  # without a self-check, too
        with pytest.raises(UserError) as caught:
            first.to_empty(device="cpu")(torch.zeros(1, 3, dtype=torch.int64))
        assert caught.value.code == "model.family-output"
    wording(str(caught.value).replace(__name__, "MODULE"))


@pytest.mark.parametrize(("config", "has_vector"), [({"vocab_size": 16}, False), ({}, False), ({}, True)])
def test_vocabulary_with_a_head_of_several_matrices_is_that_of_config_or_embedding(
    config: dict[str, Any], has_vector: bool
) -> None:
    """Such a head may have a vector called `weight` as well."""

    def make(modules: tuple[str, ...], width: int = 8, vocab_size: int = 16) -> nn.Module:
        head = nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, vocab_size))
        if has_vector:
            head.register_parameter("weight", nn.Parameter(torch.ones(vocab_size)))
        layers = nn.ModuleDict({"0": nn.Linear(width, width, bias=False)})
        return nn.ModuleDict({"layers": layers, "embed": nn.Embedding(vocab_size, width), "head": head})

    tensors = {name: tuple(tensor.shape) for name, tensor in make(SHAPE.modules).named_parameters()}
    asked = request_of(replace(SHAPE, tensors=tensors, hidden_size=8), config, DESCRIPTION, max_seq_len=8)
    tiny = runner.NamedFamily(asked, make, partial(make, width=4, vocab_size=6)).tiny()
    assert (asked.vocab_size, tiny.vocab_size, tiny.hidden_size) == (16, 6, 4)


def test_vocabulary_of_a_tiny_model_is_that_of_its_head_and_not_its_number_of_positions() -> None:
    def make(modules: tuple[str, ...], width: int = 8, vocab_size: int = 16, num_positions: int = 16) -> nn.Module:
        embeddings = {"positions": nn.Embedding(num_positions, width), "embed": nn.Embedding(vocab_size, width)}
        layers = nn.ModuleDict({"0": nn.Linear(width, width, bias=False)})
        return nn.ModuleDict({**embeddings, "layers": layers, "head": nn.Linear(width, vocab_size, bias=False)})

    shape = replace(SHAPE, modules=("positions", *SHAPE.modules), hidden_size=8)
    tensors = {name: tuple(tensor.shape) for name, tensor in make(shape.modules).named_parameters()}
    asked = request_of(replace(shape, tensors=tensors), {}, DESCRIPTION, max_seq_len=8)
    tiny = runner.NamedFamily(asked, make, partial(make, width=4, vocab_size=6, num_positions=5)).tiny()
    assert (tiny.vocab_size, tiny.hidden_size) == (6, 4)


def test_named_family_of_a_large_model_needs_a_tiny_one() -> None:
    family = decoder_family(8192, is_wrong=False)
    with pytest.raises(UserError) as caught:
        check_stages(family, (family.modules,))
    assert (caught.value.code, caught.value.where) == ("model.no-self-check", "config.json")


def test_plan_of_a_family_names_its_modules_and_styles_of_transformers(wording: Callable[[str], None]) -> None:
    family = decoder_family(4, is_wrong=False)
    check_plans(family, ParallelDims(pipeline=1))
    with pytest.raises(UserError) as caught:
        check_plans(family, ParallelDims(pipeline=1, tensor=2))
    assert (caught.value.where, caught.value.code) == ("--tp", "options.tp-architecture")
    wording(str(caught.value))
    make = partial(Decoder, width=4)
    for plan, is_known in (({"layers.*": "colwise"}, True), ({"layer.*": "colwise"}, False), ({"head": "rows"}, False)):
        planned = runner.NamedFamily(family._request, make, tp_plan=plan)
        if is_known:
            check_plans(planned, ParallelDims(pipeline=1, tensor=2))
            continue
        with pytest.raises(UserError) as caught:
            check_plans(planned, ParallelDims(pipeline=1, tensor=2))
        assert caught.value.code == "model.family-plan"
        wording(str(caught.value))


def test_rows_give_stages_positions_and_a_mask_of_what_counts() -> None:
    family = runner.NamedFamily(request(), nn.ModuleDict, row_inputs=("position_ids", "attention_mask"))
    tokens, labels = torch.zeros(2, 4, dtype=torch.int64), torch.tensor([[5, -100, 3, -100], [-100] * 4])
    inputs = row_inputs_of(family, tokens, labels)
    assert inputs["position_ids"].tolist() == [[0, 1, 2, 3]] * 2
    assert inputs["attention_mask"].tolist() == [[1, 1, 1, 0], [0, 0, 0, 0]]
    positions = torch.tensor([[0, 1, 0, 1], [0, 0, 1, 2]])
    assert row_inputs_of(family, tokens, None, positions)["position_ids"] is positions
    assert row_inputs_of(decoder_family(4, is_wrong=False), tokens, labels) == {}
