"""The self-check: what it lets pass, and what it refuses."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch
import transformers

from manifests.errors import ModelError
from runner.models import family_for
from runner.models.generic import Generic
from runner.pipeline import self_check
from runner.pipeline.self_check import SelfChecked, check_stages
from tests.fast.models.catalogued import config_of, quiet
from tests.fast.runner.twins import NAME, TwinForCausalLM, entry_of_twin, twin_config


@pytest.fixture
def twin(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Generic]:
    monkeypatch.setattr(transformers, NAME, TwinForCausalLM, raising=False)
    return lambda wrong: Generic(entry_of_twin(), twin_config(wrong), max_seq_len=8)


def check(family: Generic, *sizes: int) -> None:
    """Check stages of so many modules each; the last one has the rest."""
    bounds = [0, *itertools.accumulate(sizes), len(family.modules)]
    with quiet():
        check_stages(family, [family.modules[low:high] for low, high in itertools.pairwise(bounds)])


@pytest.mark.parametrize("sizes", [(), (3, 2), (1, 0, 4, 2)])
def test_a_right_twin_passes_however_it_is_cut(sizes: tuple[int, ...], twin: Callable[[str], Generic]) -> None:
    check(twin("nothing"), *sizes)


@pytest.mark.parametrize("wrong", ["scales", "skips", "reads", "loses"])
def test_what_a_model_does_outside_its_layers_is_refused(
    wrong: str, twin: Callable[[str], Generic], wording: Callable[[str], None]
) -> None:
    with pytest.raises(ModelError) as caught:
        check(twin(wrong), 3)
    assert (caught.value.code, caught.value.where) == ("model.self-check-failed", "config.json")
    assert caught.value.exit_code == 3  # no restart helps
    if wrong == "reads":  # the others say numbers
        wording(str(caught.value))


def test_a_model_that_cannot_be_small_says_so(twin: Callable[[str], Generic], wording: Callable[[str], None]) -> None:
    with pytest.raises(ModelError) as caught:
        check(twin("large"), 3)
    assert (caught.value.code, caught.value.where) == ("model.no-self-check", "config.json")
    wording(str(caught.value))


def test_dropout_draws_the_same_numbers_in_stages(monkeypatch: pytest.MonkeyPatch) -> None:
    config = config_of("GPTNeoXForCausalLM", hidden_dropout=0.1, attention_dropout=0.1, tie_word_embeddings=True)
    family = family_for({**config.to_dict(), "architectures": ["GPTNeoXForCausalLM"]}, max_seq_len=8)
    assert isinstance(family, Generic)
    check(family, 2, 2)
    monkeypatch.setattr(self_check, "_seed_by_name", lambda model: None)
    with pytest.raises(ModelError) as caught:
        check(family, 2, 2)
    assert caught.value.code == "model.self-check-failed"


def test_random_numbers_of_the_run_are_untouched(twin: Callable[[str], Generic]) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check(twin("nothing"))
    assert torch.equal(torch.rand(3), expected)


def test_families_of_their_own_shapes_are_not_checked() -> None:
    config = config_of("Qwen2ForCausalLM").to_dict()
    assert not isinstance(family_for({**config, "architectures": ["Qwen2ForCausalLM"]}, max_seq_len=8), SelfChecked)
