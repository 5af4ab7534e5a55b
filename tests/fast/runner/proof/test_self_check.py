"""The self-check: what it lets pass, and what it refuses."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import OlmoConfig, OlmoForCausalLM, OlmoModel
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.olmo.modeling_olmo import OlmoDecoderLayer

from manifests.errors import ModelError, UserError
from manifests.models.adapters import ALL_LINEAR
from manifests.models.catalogue import CatalogueEntry, catalogued, entry_of, make_entry
from runner.config.lora import LoraOptions
from runner.config.schema import ComputeOptions, Dtype
from runner.models import family_for, generic
from runner.models.generic import Generic
from runner.proof import stages as self_check
from runner.proof.options import RunOptions, check_stages
from runner.proof.proving import compare
from runner.proof.tiny_step import float32_as_float64
from tests.fast.manifests.models.built import DECODERS, read_config
from tests.fast.manifests.models.catalogued import config_of, quiet
from tests.fast.runner.proof.combinations import combination

pytestmark = pytest.mark.usefixtures("one_rank")

NAME = "TwinForCausalLM"


class _Twice(torch.autograd.Function):
    """A product of which the second backward through one result is twice the first."""

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, scale)
        ctx.num_backwards = 0
        return hidden * scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden, scale = ctx.saved_tensors
        ctx.num_backwards += 1
        return gradient * scale, (gradient * hidden).sum() * ctx.num_backwards


class _TwinLayer(OlmoDecoderLayer):
    def __init__(self, config: OlmoConfig, index: int) -> None:
        super().__init__(config, index)
        self.wrong = config.wrong
        if config.wrong == "rounds":
            self.register_buffer("phase", torch.full((1,), 1000.5))

    def forward(self, hidden_states: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        if self.wrong == "differs" and torch._C._current_graph_task_id() >= 0:  # in a backward: it is recomputed
            hidden_states = 2 * hidden_states
        elif self.wrong == "rounds":
            hidden_states = hidden_states * (2 + self.phase.float().cos()).to(hidden_states.dtype)
        elif self.wrong == "doubles":
            hidden_states = _Twice.apply(hidden_states, 1 + self.mlp.down_proj.weight.mean())  # type: ignore[no-untyped-call]
        return super().forward(hidden_states, **kwargs)


class _Centered(nn.Linear):
    """A head that reads all tokens of what it is called with."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().forward(hidden - hidden.mean(-2, keepdim=True))


class _TwinModel(OlmoModel):
    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(_TwinLayer(config, index) for index in range(config.num_hidden_layers))

    @property
    def _is_whole(self) -> bool:
        return all(isinstance(layer, _TwinLayer) for layer in self.layers)

    def forward(self, input_ids: Any = None, inputs_embeds: Any = None, **_: Any) -> BaseModelOutputWithPast:
        hidden = embedded = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        positions = self.rotary_emb(hidden, position_ids=torch.arange(hidden.shape[1])[None])
        for layer in self.layers:
            hidden = layer(hidden, attention_mask=None, position_embeddings=positions)
            if self.config.wrong == "scales":
                hidden = 1.1 * hidden
            elif self.config.wrong == "narrows" and hidden.dtype == torch.bfloat16 and not self._is_whole:
                hidden = 2 * hidden
            elif hidden.dtype == torch.bfloat16 and self.config.wrong in ("overflows", "overflows whole"):
                hidden = hidden * (torch.nan if self._is_whole or self.config.wrong == "overflows" else 1)
            elif self.config.wrong == "skips":
                hidden = hidden + 0.1 * embedded
            elif self.config.wrong == "halves" and not self.training:
                hidden = hidden / 2
            elif self.config.wrong == "reads":
                hidden = hidden + self.layers[0].mlp.down_proj.weight.mean()
        return BaseModelOutputWithPast(last_hidden_state=self.norm(hidden))


class TwinForCausalLM(OlmoForCausalLM):
    _keep_in_fp32_modules_strict = ("phase",)

    def __init__(self, config: OlmoConfig) -> None:
        super().__init__(config)
        if config.wrong == "large" and config.hidden_size < 128:
            raise RuntimeError(f"{config.hidden_size} is too small")
        self.model = _TwinModel(config)
        if config.wrong == "centers":
            self.lm_head = _Centered(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def forward(self, input_ids: Any = None, labels: Any = None, inputs_embeds: Any = None, **_: Any) -> Any:
        found = super().forward(input_ids=input_ids, labels=labels, inputs_embeds=inputs_embeds, use_cache=False)
        if labels is not None and self.config.wrong == "loses":
            found.loss = found.loss + 0.01 * found.logits.pow(2).mean()
        return found


def entry_of_twin() -> CatalogueEntry:
    entry = entry_of("OlmoForCausalLM")
    assert entry is not None
    return make_entry(NAME, {"inputs": entry.inputs, "layers": entry.layers, "outputs": entry.outputs})


def twin_config(wrong: str) -> dict[str, Any]:
    config = OlmoConfig(hidden_size=128, intermediate_size=256, num_attention_heads=8, num_key_value_heads=4,
                        num_hidden_layers=5, vocab_size=200, max_position_embeddings=512)  # fmt: skip
    return {**config.to_dict(), "architectures": [NAME], "wrong": wrong}


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Generic]:
    # Not the module of that name: transformers imports itself again when a model of experts is built.
    monkeypatch.setattr(generic.transformers, NAME, TwinForCausalLM, raising=False)
    return lambda wrong: Generic(entry_of_twin(), twin_config(wrong), max_seq_len=8)


def check(family: Generic, *sizes: int, run: RunOptions | None = None) -> None:
    """Check stages of so many modules each; the last one has the rest."""
    bounds = [0, *itertools.accumulate(sizes), len(family.modules)]
    with quiet():
        check_stages(family, [family.modules[low:high] for low, high in itertools.pairwise(bounds)], run)


@pytest.mark.parametrize("sizes", [(), (3, 2), (1, 0, 4, 2)])
def test_a_right_twin_passes_however_it_is_cut(sizes: tuple[int, ...], twin: Callable[[str], Generic]) -> None:
    check(twin("nothing"), *sizes)


@pytest.mark.parametrize("wrong", ["scales", "skips", "halves", "reads", "loses"])
def test_what_a_model_does_outside_its_layers_is_refused(
    wrong: str, twin: Callable[[str], Generic], wording: Callable[[str], None]
) -> None:
    with pytest.raises(ModelError) as caught:
        check(twin(wrong), 3)
    assert (caught.value.code, caught.value.where) == ("model.self-check-failed", "config.json")
    assert caught.value.exit_code == 3  # no restart helps
    if wrong == "reads":  # the others say numbers
        wording(str(caught.value))


# A layer that is another one when it is recomputed, stages that scale between layers in bfloat16, a whole model that
# alone is NaN in it, a head that reads all tokens, and a product whose backward may run once: each with the option that
# it is wrong with.
WRONG_WITH: Mapping[str, tuple[str, RunOptions]] = {
    "differs": ("--ac full", RunOptions(compute=ComputeOptions(recompute="full"))),
    "narrows": ("--dtype bf16 --master-dtype fp32", RunOptions(compute=ComputeOptions(dtype="bf16"))),
    "overflows whole": ("--dtype bf16 --master-dtype fp32", RunOptions(compute=ComputeOptions(dtype="bf16"))),
    "centers": ("--loss-chunk 512", RunOptions(compute=ComputeOptions(loss_chunk=512))),
    "doubles": ("--schedule ZBVZeroBubble", RunOptions(splitting="ZBVZeroBubble")),
}


@pytest.mark.parametrize("wrong", WRONG_WITH)
def test_what_is_wrong_with_an_option_alone_is_refused_by_its_name(
    wrong: str, twin: Callable[[str], Generic], wording: Callable[[str], None]
) -> None:
    where, run = WRONG_WITH[wrong]
    all_at_once = ComputeOptions(dtype="bf16", recompute="full", loss_chunk=512)
    family, splitting = twin(wrong), WRONG_WITH["doubles"][1].splitting
    check(family, 3)
    for options in (run, RunOptions(compute=all_at_once, splitting=splitting)):
        with pytest.raises(ModelError) as caught:
            check(family, 3, run=options)
        assert (caught.value.code, caught.value.where) == ("model.self-check-failed", where)
    if wrong == "differs":
        wording(re.sub(r"the gradient .*", "…", str(caught.value)))


def test_stages_that_are_nan_where_the_whole_model_is_pass(twin: Callable[[str], Generic]) -> None:
    check(twin("overflows"), 3, run=RunOptions(compute=ComputeOptions(dtype="bf16", loss_chunk=512)))


def test_a_machine_that_cannot_compile_is_told_so(
    twin: Callable[[str], Generic], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch._inductor.config.cpp, "cxx", (None, str(tmp_path / "g++")))
    with pytest.raises(ModelError) as caught:
        check(twin("nothing"), 1, run=RunOptions(compute=ComputeOptions(is_compiled=True)))
    assert (caught.value.code, caught.value.where) == ("model.self-check-failed", "--compile")
    assert "InvalidCxxCompiler" in caught.value.problem
    assert "wrongly" not in (caught.value.hint or "")


def test_right_stages_pass_with_all_options(twin: Callable[[str], Generic]) -> None:
    compute = ComputeOptions(dtype="bf16", master_dtype="fp32", recompute="full", loss_chunk=512)
    check(twin("nothing"), 1, 0, 4, run=RunOptions(compute=compute, splitting="ZBVZeroBubble"))
    check(twin("nothing"), 3, run=RunOptions(compute=replace(compute, master_dtype="bf16", recompute="selective")))


def test_buffers_that_transformers_keeps_in_float32_are_not_rounded(twin: Callable[[str], Generic]) -> None:
    check(twin("rounds"), 3, run=RunOptions(compute=ComputeOptions(dtype="bf16")))


@pytest.mark.parametrize(
    ("name", "master"),
    [("Ernie4_5_MoeForCausalLM", "fp32"), pytest.param("BeamForCausalLM", "bf16", marks=pytest.mark.slow)],
)
def test_a_parameter_that_transformers_keeps_in_float32_is_not_rounded(
    name: str, master: Dtype, monkeypatch: pytest.MonkeyPatch, wording: Callable[[str], None]
) -> None:
    family = family_for({**config_of(name).to_dict(), "architectures": [name]}, max_seq_len=8)
    assert isinstance(family, Generic)
    run = RunOptions(compute=ComputeOptions(dtype="bf16", master_dtype=master, recompute="full"))
    check(family, 3, run=run)
    monkeypatch.setattr(Generic, "float32_names", lambda self, dtype: ())
    with pytest.raises(ModelError) as caught:
        check(family, 3, run=run)
    assert (caught.value.code, caught.value.where.split()[0]) == ("model.self-check-failed", "--dtype")
    if master == "fp32":
        wording(str(caught.value))


@pytest.mark.slow  # test_generic_steps.py has its gradients
def test_gemma_3n_whose_layers_change_results_in_place_is_recomputed_right() -> None:
    config = config_of("Gemma3nForCausalLM")
    family = family_for({**config.to_dict(), "architectures": ["Gemma3nForCausalLM"]}, max_seq_len=8)
    assert isinstance(family, Generic)
    check(family, len(family.modules) // 2, run=RunOptions(compute=ComputeOptions(recompute="selective")))


# Layers that hand on float32, logits in float32, and buffers that transformers makes in the model's dtype.
@pytest.mark.parametrize(
    "name",
    [
        "MambaForCausalLM",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("NemotronHForCausalLM", "XGLMForCausalLM")),
        "OpenAIGPTLMHeadModel",
    ],
)
def test_models_that_compute_in_two_dtypes_pass_in_bfloat16(name: str) -> None:
    family = family_for({**config_of(name).to_dict(), "architectures": [name]}, max_seq_len=8)
    assert isinstance(family, Generic)
    compute = ComputeOptions(dtype="bf16", recompute="full")
    check(family, run=RunOptions(compute=compute))
    check(family, len(family.modules) // 2, run=RunOptions(compute=replace(compute, loss_chunk=5)))


def test_a_model_that_computes_in_float32_alone_is_refused_in_bfloat16() -> None:
    family = family_for(
        {**config_of("xLSTMForCausalLM").to_dict(), "architectures": ["xLSTMForCausalLM"]}, max_seq_len=8
    )
    assert isinstance(family, Generic)
    with pytest.raises(ModelError) as caught:
        check(family, run=RunOptions(compute=ComputeOptions(dtype="bf16")))
    assert (caught.value.code, caught.value.where) == ("model.no-self-check", "--dtype bf16")


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_layers_are_compared_with_eager_ones(twin: Callable[[str], Generic]) -> None:
    check(twin("nothing"), 3, run=RunOptions(compute=ComputeOptions(is_compiled=True)))


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_compiled_layers_with_dropout_are_compared_without_it() -> None:
    config = read_config("tiny-gpt2", embd_pdrop=0.1, attn_pdrop=0.1, resid_pdrop=0.1)
    family = family_for(config, max_seq_len=8)
    assert isinstance(family, Generic)
    check(family, run=RunOptions(compute=ComputeOptions(is_compiled=True)))


def test_a_model_that_cannot_be_small_says_so(twin: Callable[[str], Generic], wording: Callable[[str], None]) -> None:
    with pytest.raises(ModelError) as caught:
        check(twin("large"), 3)
    assert (caught.value.code, caught.value.where) == ("model.no-self-check", "config.json")
    wording(str(caught.value))


def test_a_config_with_which_the_whole_model_is_nan_is_not_an_error_of_stages() -> None:
    config = {**config_of("LlamaForCausalLM").to_dict(), "architectures": ["LlamaForCausalLM"]}
    family = family_for({**config, "rope_parameters": {"rope_type": "default", "rope_theta": -1.0}}, max_seq_len=8)
    assert isinstance(family, Generic)
    with pytest.raises(ModelError) as caught:
        check(family, 3)
    assert (caught.value.code, caught.value.where) == ("model.no-self-check", "config.json")
    assert "stage" not in str(caught.value)


def test_dropout_draws_the_same_numbers_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("GPTNeoXForCausalLM", hidden_dropout=0.1, attention_dropout=0.1, tie_word_embeddings=True)
    family = family_for({**config.to_dict(), "architectures": ["GPTNeoXForCausalLM"]}, max_seq_len=8)
    assert isinstance(family, Generic)
    check(family, 2, 2)
    monkeypatch.setattr(self_check, "_seed_by_name", lambda model: None)
    with pytest.raises(ModelError) as caught:
        check(family, 2, 2)
    assert caught.value.code == "model.self-check-failed"


def test_dropout_of_an_adapter_outside_of_the_layers_is_drawn_in_its_stage() -> None:
    family = family_for(read_config("tiny-opt", word_embed_proj_dim=16), max_seq_len=8)
    assert isinstance(family, Generic)
    lora = LoraOptions(rank=2, alpha=4.0, target=ALL_LINEAR, experts=False, dropout=0.5, is_rank_scaled=False)
    family.add_adapters(lora)
    assert family.adapters is not None
    assert "model.decoder.project_out" in family.adapters.linear
    check(family, len(family.modules) // 2)


def test_random_numbers_of_the_run_are_untouched(twin: Callable[[str], Generic]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(twin("nothing"))
    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize(
    ("name", "changes"),
    [("tiny-gpt2", {}), ("tiny-mixtral", {}), ("tiny-mpt", {}), ("tiny-opt", {"word_embed_proj_dim": 16})],
)
def test_architectures_of_the_table_take_every_option_with_each_module_on_its_own_stage(
    name: str, changes: Mapping[str, int]
) -> None:
    family = family_for(read_config(name, **changes), max_seq_len=8)
    assert isinstance(family, Generic)
    options = ComputeOptions(recompute="selective", loss_chunk=5)
    check(family, *[1] * (len(family.modules) - 1), run=RunOptions(compute=options, splitting="ZBVZeroBubble"))


@pytest.mark.slow
@pytest.mark.parametrize("name", DECODERS)
def test_compiled_layers_of_architectures_of_the_table_compute_what_the_whole_model_does(name: str) -> None:
    family = family_for(read_config(name), max_seq_len=8)
    assert isinstance(family, Generic)
    options = ComputeOptions(recompute="full", is_compiled=True)
    check(family, *[1] * (len(family.modules) - 1), run=RunOptions(compute=options))


@pytest.mark.parametrize(("heads", "width", "is_right"), [(2, 32, True), (4, 32, False)])
def test_head_dim_stays_right_in_the_tiny_model_or_is_refused(heads: int, width: int, is_right: bool) -> None:
    """StableLM's heads are as wide as their share of the hidden size; `head_dim` is read for what rotates alone."""
    config = config_of("StableLmForCausalLM", num_attention_heads=heads, num_key_value_heads=heads, head_dim=width)
    fields = {**config.to_dict(), "architectures": ["StableLmForCausalLM"]}
    if is_right:
        family = family_for(fields, max_seq_len=8)
        check_stages(family, [family.modules[:3], family.modules[3:]])  # type: ignore[arg-type]
        return
    with pytest.raises(UserError) as caught:
        family_for(fields, max_seq_len=8)
    assert caught.value.where == "config.json: head_dim"


# What code computes in float32 is float64 in a proof.


def norm(tensor: torch.Tensor) -> torch.Tensor:
    wide = tensor.to(torch.float32)
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True))).to(tensor.dtype)


def gradient_of(tensor: torch.Tensor) -> torch.Tensor:
    """Recompute what rounds: in the backward, which is not intercepted."""
    leaf = tensor.detach().requires_grad_()
    torch.autograd.backward(checkpoint(norm, leaf, use_reentrant=False)[0])
    assert leaf.grad is not None
    return leaf.grad


def test_casts_to_float32_do_not_round_forward_or_when_they_are_recomputed() -> None:
    tensor = torch.linspace(0.1, 1.0, 7, dtype=torch.float64)
    exact = tensor * tensor.pow(2).mean().rsqrt()
    assert not torch.equal(norm(tensor), exact)
    rounded = gradient_of(tensor)
    with float32_as_float64():
        assert torch.zeros(1).dtype == torch.ones(1).float().dtype == torch.float64
        assert torch.allclose(norm(tensor), exact, rtol=1e-14, atol=0)
        assert 1e-9 < (gradient_of(tensor) - rounded).abs().max() < 1e-6
    assert torch.zeros(1).dtype == torch.float32
    assert not torch.equal(norm(tensor), exact)


# What balances experts: of every architecture with routers, a step is that of one process of transformers' model.


FLAGS = {
    name: (*(("--router-bias-rate", "0.001") if entry.router_bias else ()),
           *(("--router-aux-loss", "0.001") if entry.aux_loss else ()))
    for name in catalogued() if (entry := entry_of(name))
}  # fmt: skip


def test_parameters_that_are_not_trained_have_no_optimizer_state_to_reload() -> None:
    assert compare(combination("LlamaForCausalLM", 1, "--train-only", "mlp"))[1] is None


# In evaluation mode transformers halves the hidden state after every sixth block of RWKV, and runs all blocks of xLSTM
# over one part of a row after the other.
@pytest.mark.parametrize(
    ("architecture", "changes"),
    [("RwkvForCausalLM", {"num_hidden_layers": 14}), ("xLSTMForCausalLM", {"max_inference_chunksize": 4})],
)
def test_stages_evaluate_as_the_whole_model_does_where_that_is_not_as_it_trains(
    architecture: str, changes: dict[str, int]
) -> None:
    assert compare(combination(architecture, 1, vpp=2, **changes))[1] is None


# XGLM's lowest score is that of float64; the norm of Gemma 4 is of gradients that rounding changes more than others.
@pytest.mark.parametrize("architecture", ["XGLMForCausalLM", "Gemma4ForCausalLM"])
def test_a_right_model_with_masters_passes(architecture: str) -> None:
    assert compare(combination(architecture, 1, "--dtype", "bf16", "--master-dtype", "fp32"))[1] is None


@pytest.mark.slow
@pytest.mark.parametrize("architecture", [name for name, flags in FLAGS.items() if flags])
def test_biases_and_gradients_of_routers_are_those_of_one_process(architecture: str) -> None:
    distances, problem = compare(combination(architecture, 1, *FLAGS[architecture]))
    assert problem is None
    assert distances is not None
    assert max(distances.largest.values()) <= 1e-10 or distances.dtype == "fp32"
