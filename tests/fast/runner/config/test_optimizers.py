"""Parameter groups: what flags and files ask for, which parameters each has, and what a checkpoint's state refuses."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.nn import Linear

import reshard
from manifests.codec import decode_manifest, encode_manifest
from manifests.errors import UserError
from manifests.models import ModelShape, model_shape
from manifests.optimizer_groups import PRESETS, state_counter
from manifests.optimizer_state import (
    GroupNumbers,
    compact_patterns,
    count_state,
    hidden_matrices,
    kinds_of,
    state_shapes,
)
from manifests.schema import MOMENTS, Layout, Manifest, OptimizerState, Shard, Stage, StateKind, TrainingState
from runner.config.flags import parse_training
from runner.config.optimizers import check_flags, check_state_fits, describe_groups, numbers_of, optimizer_of
from runner.config.schema import OptimOptions
from runner.training.algorithms import algorithms_of, declare_kinds, plan_groups
from tests.builders import EMBEDDING, HEAD, llama_config, random_tensors, write_model
from tests.fast.manifests.drawn_manifests import digest_of, full_manifest
from tests.fast.manifests.models.catalogued import build_meta, stored_by

MATRIX, NORM = "model.layers.0.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"


def shape_of(**changes: Any) -> ModelShape:
    return model_shape(llama_config(**changes), "config.json")


def plan_of(*flags: str, stored: OptimizerState | None = None, **changes: Any) -> OptimizerState:
    shape = shape_of(**changes)
    optim = parse_training(["--data", "synthetic", *flags]).optim
    return declare_kinds(optimizer_of(optim, shape, stored), shape)


def write(folder: Path, text: str) -> str:
    (folder / "groups.toml").write_text(text)
    return str(folder / "groups.toml")


def refused_with(code: str, *flags: str, stored: OptimizerState | None = None) -> UserError:
    with pytest.raises(UserError) as error:
        plan_of(*flags, stored=stored)
    assert error.value.code == code
    return error.value


def test_muon_trains_matrices_of_layers_and_adamw_the_rest() -> None:
    plan, shape = plan_of("--optimizer", "muon", "--momentum", "0.9"), shape_of()
    numbers = numbers_of(plan, shape)
    of_muon = {fqn for fqn in shape.tensors if numbers.of(fqn) == 0}
    assert of_muon == {fqn for fqn, dims in shape.tensors.items() if "layers" in fqn and len(dims) == 2}
    assert [group.algorithm for group in plan.groups] == ["Muon", None]
    assert {kind.name: kind.groups for kind in kinds_of(plan)} == {
        "momentum_buffer": (0,), "exp_avg": (1,), "exp_avg_sq": (1,)
    }  # fmt: skip
    assert [line.split(":")[1].split(",")[0].strip() for line in describe_groups(plan, shape)] == ["Muon", "AdamW"]


@pytest.mark.parametrize("name", PRESETS)
def test_memory_of_state_is_planned_as_torch_has_it(name: str) -> None:
    shape, count = shape_of(), state_counter(name, shape_of())
    planned = {fqn: count(fqn) for fqn in shape.tensors}
    assert planned == count_state(plan_of("--optimizer", name), shape.tensors)
    expected = {"adamw": (2, 2), "adam": (2, 2), "sgd": (1, 1), "muon": (1, 2)}.get(name)
    if expected is not None:
        assert (planned[MATRIX], planned[EMBEDDING]) == expected
    else:
        rows, columns = shape.tensors[MATRIX]
        assert (planned[MATRIX], planned[NORM]) == (pytest.approx((rows + columns) / (rows * columns)), 1)


def test_memory_of_groups_of_a_file_is_planned_as_torch_has_it(tmp_path: Path) -> None:
    text = """
        [[group]]
        algorithm = "muon"
        patterns = ["model.layers.*_proj.weight"]
        [[group]]
        algorithm = "torch.optim.SGD"
        patterns = ["lm_head.weight"]
        elementwise = true
        [[group]]
        algorithm = "sgd"
        momentum = 0.0
        patterns = ["model.embed_tokens.weight"]
        [[group]]
        algorithm = "adamw"
        amsgrad = true
    """
    shape, file = shape_of(), write(tmp_path, text)
    count, plan = state_counter(file, shape), plan_of("--optimizer", file)
    assert {fqn: count(fqn) for fqn in shape.tensors} == count_state(plan, shape.tensors)
    assert [count(fqn) for fqn in (MATRIX, HEAD, EMBEDDING, NORM)] == [1, 0, 0, 3]
    optim = parse_training(["--data", "synthetic", "--optimizer", "tests.toy_optimizers.Signs"]).optim
    with pytest.raises(UserError) as error:
        state_counter(str(optim.optimizer), shape)
    assert error.value.code == "options.optimizer"


def test_adamw_is_what_version_1_describes() -> None:
    for flags in ((), ("--optimizer", "adamw"), ("--no-weight-decay-1d",)):
        plan = plan_of(*flags)
        assert (plan.name, plan.kinds, plan.ema) == ("AdamW", None, 0.0)
    assert len(plan.groups) == 2
    kinds = plan_of("--ema", "0.99").kinds
    assert kinds is not None
    assert [kind.name for kind in kinds] == ["exp_avg", "exp_avg_sq", "ema"]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_model_without_vectors_has_no_group_of_them(name: str) -> None:
    shape = shape_of()  # OLMo's norms have no weights
    shape = replace(shape, tensors={fqn: dims for fqn, dims in shape.tensors.items() if len(dims) > 1})
    for_all, bare = (
        declare_kinds(
            optimizer_of(parse_training(["--data", "synthetic", "--optimizer", name, *flag]).optim, shape), shape
        )
        for flag in ((), ("--no-weight-decay-1d",))
    )
    assert bare == for_all


@pytest.mark.parametrize("tied", [False, True])
def test_file_has_groups_whose_first_match_wins_and_the_last_has_the_rest(tmp_path: Path, tied: bool) -> None:
    text = """
        [[group]]
        algorithm = "sgd"
        patterns = ["*norm.weight"]
        clip = false
        rate_factor = 0.5
        [[group]]
        algorithm = "adamw"
        patterns = ["model.embed_tokens.*", "lm_head.weight"]
        betas = [0.8, 0.9]
        weight_decay = 0
        [[group]]
        algorithm = "torch.optim.Adagrad"
        elementwise = true
    """
    plan = plan_of("--optimizer", write(tmp_path, text), tie_word_embeddings=tied)
    numbers = numbers_of(plan, shape_of(tie_word_embeddings=tied))
    assert [numbers.of(fqn) for fqn in (NORM, EMBEDDING, HEAD, MATRIX)] == [0, 1, 1, 2]
    assert (plan.groups[0].skips_clipping, plan.groups[0].rate_factor) == (True, 0.5)
    assert (plan.groups[1].beta1, plan.groups[1].weight_decay) == (0.8, 0.0)
    assert {kind.name for kind in kinds_of(plan)} == {"momentum_buffer", "exp_avg", "exp_avg_sq", "sum"}


@pytest.mark.parametrize("pattern", [EMBEDDING, "lm_head.*"])
@pytest.mark.parametrize("stored", [EMBEDDING, HEAD])
def test_pattern_of_either_name_has_a_tied_weight_whichever_of_them_is_stored(
    tmp_path: Path, pattern: str, stored: str
) -> None:
    config = llama_config(tie_word_embeddings=True)
    tensors = random_tensors(config)
    embedding = tensors.pop(EMBEDDING)
    write_model(tmp_path / "model", config, {**tensors, stored: embedding})
    ties = [[member.fqn for member in tie.members] for tie in reshard.plan(tmp_path / "model", "pp=2").ties]
    text = f'[[group]]\nalgorithm = "sgd"\npatterns = ["{pattern}"]\n[[group]]\nalgorithm = "adamw"'
    plan = plan_of("--optimizer", write(tmp_path, text), tie_word_embeddings=True)
    numbers = GroupNumbers(plan.groups, ties)
    assert [numbers.of(fqn) for fqn in (EMBEDDING, HEAD, NORM)] == [0, 0, 1]


@pytest.mark.parametrize(
    ("text", "code"),
    [
        ('[[group]]\nalgorithm = "adamw"\npatterns = ["model.layer.*"]', "options.optimizer-pattern"),
        ('[[group]]\nalgorithm = "sgd"\npatterns = ["*"]\n[[group]]\nalgorithm = "adamw"\npatterns = ["*norm*"]',
         "options.optimizer-pattern"),
        ('[[group]]\nalgorithm = "muon"', "options.optimizer-pattern"),
        ('[[group]]\nalgorithm = "lion"', "options.optimizer-file"),
        ('[[group]]\nalgorithm = "adamw"\nbetas = [0.9, 1.0]', "options.optimizer-file"),
        ('[[group]]\nalgorithm = "adamw"\neps = 0.0', "options.optimizer-file"),  # 0/0 for weights without gradient
        ('[[group]]\nalgorithm = "adam"\neps = 1e-46', "options.optimizer-file"),  # 0 in float32
        ('[[group]]\nalgorithm = "adamw"\nweight_decay = "much"', "options.optimizer-file"),
        ('[[groups]]\nalgorithm = "adamw"', "options.optimizer-file"),
        ("[[group]", "options.optimizer-file"),
        ('[[group]]\nalgorithm = "sgd"\nmomenta = 0.9', "options.optimizer"),
        ('[[group]]\nalgorithm = "torch.optim.Lion"', "options.optimizer"),
        ('[[group]]\nalgorithm = "no.such.package"', "options.optimizer"),
        ('[[group]]\nalgorithm = "torch.optim.Adafactor"\nelementwise = true', "options.optimizer"),
        ('[[group]]\nalgorithm = "torch.optim.NAdam"', "options.optimizer"),
        ('[[group]]\nalgorithm = "torch.nn.Linear"', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.Normed"\nelementwise = true', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.RowNormed"\nelementwise = true', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.Counting"\nelementwise = true', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.Counting"', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.CountingItself"', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.MatricesAlone"', "options.optimizer-pattern"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.MatricesAlone"\nelementwise = true',
         "options.optimizer-pattern"),
        ('[[group]]\nalgorithm = "torch.optim.LBFGS"', "options.optimizer"),
        ('[[group]]\nalgorithm = "torch.optim.SparseAdam"', "options.optimizer"),
        ('[[group]]\nalgorithm = "..Signs"', "options.optimizer"),
        ('[[group]]\nalgorithm = "adamw"\nfused = true\nforeach = true', "options.optimizer"),
        ('[[group]]\nalgorithm = "muon"\nns_steps = "x"', "options.optimizer"),
        ('[[group]]\nalgorithm = "adamw"\nmaximize = 2026-01-01', "options.optimizer-file"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.Renamed"', "options.optimizer"),
        ('[[group]]\nalgorithm = "tests.toy_optimizers.Splitting"', "options.optimizer"),
        ('[[group]]\nalgorithm = "adamw"\n[[group]]\nalgorithm = "sgd"', "options.optimizer-file"),
        ('[[group]]\nalgorithm = "adamw"\nlr = 0.1', "options.optimizer-file"),
        ('[[group]]\nalgorithm = "adamw"\nelementwise = 1', "options.optimizer-file"),
        ("group = []", "options.optimizer-file"),
        ("group = 1", "options.optimizer-file"),
    ],
)  # fmt: skip
def test_file_with_a_mistake_is_refused_in_one_sentence(tmp_path: Path, text: str, code: str) -> None:
    error = refused_with(code, "--optimizer", write(tmp_path, text))
    assert "\n" not in error.problem


def test_what_a_class_says_of_an_argument_is_shown_where_it_takes_matrices_alone(tmp_path: Path) -> None:
    text = (
        '[[group]]\nalgorithm = "muon"\npatterns = ["*_proj.weight"]\nns_steps = "five"\n[[group]]\nalgorithm = "adamw"'
    )
    assert "2D parameters" not in refused_with("options.optimizer", "--optimizer", write(tmp_path, text)).problem


def test_class_of_another_package_needs_whole_tensors_unless_it_says_otherwise(tmp_path: Path) -> None:
    for text, elementwise in (("", False), ("elementwise = true", True)):
        file = write(tmp_path, f'[[group]]\nalgorithm = "tests.toy_optimizers.Signs"\n{text}')
        plan = plan_of("--optimizer", file)
        assert [algorithm.is_elementwise for algorithm in algorithms_of(plan)] == [elementwise]
        assert [kind.name for kind in kinds_of(plan)] == ["velocity"]


def test_stack_of_matrices_is_refused_where_the_class_has_a_number_for_each() -> None:
    options = OptimOptions(optimizer="tests.toy_optimizers.MatricesWithNorms")
    (algorithm,) = algorithms_of(optimizer_of(options, shape_of()))
    algorithm.check_takes("experts", (8, 8))
    with pytest.raises(UserError) as error:
        algorithm.check_takes("experts", (4, 8, 8))
    assert error.value.code == "options.optimizer-pattern"


def test_class_of_torch_that_a_checkpoint_names_is_refused_if_it_cannot_be_used() -> None:
    stored = plan_of("--optimizer", "torch.optim.Adagrad")
    for name in ("LBFGS", "SparseAdam"):
        refused_with("options.optimizer", stored=replace(stored, name=name))


def planned(*flags: str, stored: OptimizerState | None = None) -> tuple[str, ...]:
    options = parse_training(["--data", "synthetic", *flags])
    return plan_groups(options, shape_of(), stored, "step-1")[1]


ADAMWS = (
    '[[group]]\nalgorithm = "adamw"\npatterns = ["*norm.weight"]\n[[group]]\nalgorithm = "adamw"\nweight_decay = 0.3'
)


def test_manifest_of_92_000_tensors_with_groups_is_small() -> None:
    config = json.loads((Path(__file__).parents[3] / "data" / "configs" / "deepseek-v3.json").read_text())
    shape = model_shape(config, "config.json")
    plan = optimizer_of(OptimOptions(optimizer="muon"), shape)
    assert sum(len(fqn) for group in plan.groups for fqn in group.fqns) < 2_000
    numbers = numbers_of(plan, shape)
    # As a DCP folder has them: by names, and here another group for the matrices of the upper layers.
    groups = [[fqn for fqn in shape.tensors if numbers.of(fqn) == number] for number in range(2)]
    upper = {fqn for fqn in groups[0] if int(fqn.split(".")[2]) >= 31}
    names = ({*groups[0]} - upper, upper, {*groups[1]})
    patterns = [compact_patterns(fqns, shape.tensors.keys() - fqns) for fqns in names]
    muon = (replace(plan.groups[0], fqns=patterns[0]), replace(plan.groups[0], fqns=patterns[1], rate_factor=0.5))
    kinds = (
        StateKind(name="momentum_buffer", shape="parameter", groups=(0, 1)),
        *(StateKind(name=name, shape="parameter", groups=(2,)) for name in MOMENTS),
    )
    plan = replace(plan, groups=(*muon, replace(plan.groups[1], fqns=())), kinds=kinds)
    manifest, num_tensors = training_manifest(shape, plan, num_stages=16)
    assert num_tensors > 92_000  # with the state of each weight
    text = encode_manifest(manifest)
    assert len(text) < 1 << 20  # of the 4 MB that a manifest may have
    decoded = decode_manifest(text).training
    assert decoded is not None
    assert decoded.optimizer is not None
    again = numbers_of(decoded.optimizer, shape)
    for number, fqns in enumerate(names):
        assert {again.of(fqn) for fqn in fqns} == {number}


def training_manifest(shape: ModelShape, plan: OptimizerState, num_stages: int) -> tuple[Manifest, int]:
    """Return a manifest of so many stages, each with two shards of every kind, and the number of tensors in them."""
    by_module, full, num_tensors, stages = shape.by_module(), full_manifest(), 0, []
    for index in range(num_stages):
        bounds = (len(shape.modules) * number // num_stages for number in (index, index + 1))
        modules = shape.modules[slice(*bounds)]
        fqns = [fqn for module in modules for fqn in by_module[module]]
        shards = []
        for kind in ("weights", *(kind.name for kind in kinds_of(plan))):
            folder = "" if kind == "weights" else f"stage-{index:03d}/{kind}/"
            paths = (f"{folder}model-{2 * index + part:05d}-of-{2 * num_stages:05d}.safetensors" for part in (1, 2))
            shards += [Shard(path=path, nbytes=1 << 33, digest=digest_of("5"), holds=kind) for path in paths]
        counts = {"num_tensors": len(fqns), "num_params": 1 << 30, "nbytes": 1 << 31}
        stages.append(Stage(index=index, rank=index, virtual=0, modules=modules, shards=tuple(shards), **counts))
        of_kinds = (
            state_shapes(kind, plan.groups, {fqn: shape.tensors[fqn] for fqn in fqns}) for kind in kinds_of(plan)
        )
        num_tensors += len(fqns) + sum(map(len, of_kinds))
    layout = Layout(spec=f"pp={num_stages}", style="loop", num_stages=num_stages, num_ranks=num_stages, num_virtual=1)
    training = TrainingState(step=5, num_tokens=5, dtype="F32", optimizer=plan)
    model = replace(full.model, architecture="DeepseekV3ForCausalLM", num_layers=61)
    return replace(full, model=model, layout=layout, stages=tuple(stages), ties=(), training=training), num_tensors


@pytest.mark.parametrize("flags", [("--optimizer", "FILE"), ("--optimizer", "sgd"), ("--ema", "0.9")])
def test_adapters_have_no_groups(tmp_path: Path, flags: tuple[str, ...]) -> None:
    words = (write(tmp_path, ADAMWS) if word == "FILE" else word for word in flags)
    with pytest.raises(UserError) as error:
        planned("--lora-rank", "4", *words)
    assert (error.value.where, error.value.code) == ("--lora-rank", "options.lora-combination")


@pytest.mark.parametrize(
    ("optimizer", "flags"),
    [
        (None, ("--momentum", "0.9")),
        ("adam", ("--momentum", "0.9")),
        ("sgd", ("--beta1", "0.9")),
        ("sgd", ("--no-weight-decay-1d",)),
        ("adafactor", ("--beta2", "0.9")),
        ("adafactor", ("--eps", "1e-8")),
        ("torch.optim.Adagrad", ("--weight-decay", "0.1")),
        ("torch.optim.Adagrad", ("--momentum", "0.9")),
        ("FILE", ("--no-weight-decay-1d",)),
        ("FILE", ("--momentum", "0.9")),
    ],
)
def test_flag_that_no_group_has_is_refused(tmp_path: Path, optimizer: str | None, flags: tuple[str, ...]) -> None:
    name = write(tmp_path, ADAMWS) if optimizer == "FILE" else optimizer
    with pytest.raises(UserError) as error:
        planned(*flags, *(() if name is None else ("--optimizer", name)))
    assert error.value.code == "options.optimizer"
    if optimizer == "sgd":
        planned("--optimizer", "sgd", "--momentum", "0.8", "--weight-decay", "0.1")


def test_flags_do_not_override_groups_without_decay_of_other_parameters() -> None:
    plain = plan_of("--no-weight-decay-1d")
    first, bare = plain.groups
    stored = replace(plain, groups=(first, replace(bare, fqns=(EMBEDDING,))))
    with pytest.raises(UserError) as error:
        planned("--weight-decay", "0.5", stored=stored)
    assert error.value.code == "options.optimizer"
    assert planned("--weight-decay", "0.5", stored=plain) == ()


def test_options_that_optimizer_changes_on_resume_are_noted() -> None:
    stored = plan_of("--optimizer", "muon", "--weight-decay", "0.5")
    assert len(planned("--optimizer", "muon", stored=stored)) == 1 + len(stored.groups)
    assert len(planned("--optimizer", "muon", "--weight-decay", "0.5", stored=stored)) == len(stored.groups)


def test_biases_of_stacked_experts_are_no_hidden_matrices() -> None:
    tensors = {"layers.0.experts.up_proj": (4, 8, 6), "layers.0.experts.up_proj_bias": (4, 8)}
    assert hidden_matrices({"layers.0": tensors}, tensors) == {"layers.0.experts.up_proj"}


@pytest.mark.parametrize("architecture", ["MambaForCausalLM", "FalconMambaForCausalLM"])
def test_hidden_matrices_of_state_space_models_are_those_of_their_linear_layers(architecture: str) -> None:
    linear = {
        f"{name}.weight" for name, module in build_meta(architecture).named_modules() if isinstance(module, Linear)
    }
    config, stored = stored_by(architecture)
    shape = model_shape(config, stored=stored)
    assert hidden_matrices(shape.by_module(), shape.tensors) == linear - {HEAD}


def test_parameter_that_another_algorithm_trained_is_named() -> None:
    shape, muon, adamw = shape_of(), plan_of("--optimizer", "muon"), plan_of()
    for plan, stored in ((adamw, muon), (muon, adamw), (plan_of("--optimizer", "adam"), adamw)):
        with pytest.raises(UserError) as error:
            check_state_fits(plan, stored, shape, "step-1")
        assert error.value.code == "resume.other-optimizer"
    check_state_fits(muon, muon, shape, "step-1")
    check_state_fits(plan_of("--ema", "0.9"), adamw, shape, "step-1")
    still = plan_of("--optimizer", "sgd", "--momentum", "0")
    with pytest.raises(UserError, match="momentum_buffer of "):
        check_state_fits(plan_of("--optimizer", "sgd"), still, shape, "step-1")


def test_state_of_what_a_resumed_run_freezes_is_not_needed() -> None:
    muon = plan_of("--optimizer", "muon")
    assert len(planned("--train-only", "embed_tokens", stored=muon)) == len(planned("--train-only", "mlp", stored=muon))


def test_groups_of_a_checkpoint_are_resumed_but_no_class_is_loaded_because_it_names_one() -> None:
    muon = plan_of("--optimizer", "muon", "--ema", "0.9")
    assert plan_of("--max-norm", "0.5", "--ema", "0.9", stored=muon) == replace(muon, max_norm=0.5)
    with pytest.raises(UserError) as error:
        check_flags(muon, {"beta1"}, shape_of())
    assert error.value.code == "options.optimizer"
    foreign = plan_of("--optimizer", "torch.optim.Adagrad")
    refused_with("resume.other-optimizer", stored=foreign)
    assert plan_of("--optimizer", "torch.optim.Adagrad", stored=foreign) == foreign
