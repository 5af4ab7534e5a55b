"""Drawing the next token, against the filters of `transformers`."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from manifests.errors import InputError
from runner.evaluation.command import Sampling
from runner.evaluation.sampling import draw, generators_of, shares

LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(3)) * 3


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
@pytest.mark.parametrize("top_k", [0, 1, 7, 500])
@pytest.mark.parametrize("top_p", [1.0, 0.9, 0.5, 0.01])
def test_shares_are_those_that_transformers_draws_from(temperature: float, top_k: int, top_p: float) -> None:
    scores = TemperatureLogitsWarper(temperature)(None, LOGITS[None])
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    found = shares(LOGITS, Sampling(temperature=temperature, top_k=top_k, top_p=top_p))
    torch.testing.assert_close(found, scores[0].softmax(-1), rtol=1e-6, atol=1e-7)


def test_without_a_temperature_the_likeliest_token_is_taken() -> None:
    (generator,) = generators_of(Sampling(), 1)
    before = generator.get_state()
    assert draw(LOGITS, Sampling(), generator) == LOGITS.argmax()
    assert torch.equal(generator.get_state(), before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_logits_that_are_not_finite_are_refused(wrong: float, temperature: float) -> None:
    sampling = Sampling(temperature=temperature)
    (generator,) = generators_of(sampling, 1)
    logits = LOGITS.clone()
    logits[7] = wrong
    with pytest.raises(InputError) as error:
        draw(logits, sampling, generator)
    assert error.value.code == "model.not-finite"


def test_temperature_at_which_logits_are_beyond_float32_is_refused() -> None:
    sampling = Sampling(temperature=1e-39)
    with pytest.raises(InputError, match=r"or a higher --temperature$"):
        draw(LOGITS, sampling, generators_of(sampling, 1)[0])


def test_draws_follow_the_shares_and_the_seed() -> None:
    sampling = Sampling(temperature=1.0, top_k=3, seed=7)
    drawn = [draw(LOGITS, sampling, generator) for generator in generators_of(sampling, 4000)]
    expected = shares(LOGITS, sampling)
    found = torch.bincount(torch.tensor(drawn), minlength=50) / 4000
    assert float((found - expected).abs().max()) < 0.03
    assert drawn[:9] == [draw(LOGITS, sampling, generator) for generator in generators_of(sampling, 9)]
