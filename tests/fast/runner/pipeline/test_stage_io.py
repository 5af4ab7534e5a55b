"""Nested outputs of stages as tensors, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from runner.pipeline.stage_io import FormError, form_of

CONSTANTS = st.one_of(st.none(), st.booleans(), st.integers(), st.text(max_size=3), st.floats(allow_nan=False))
DTYPES = st.sampled_from([torch.float32, torch.bfloat16, torch.int64, torch.bool])


@st.composite
def tensors(draw: st.DrawFn) -> torch.Tensor:
    shape = draw(st.lists(st.integers(0, 3), max_size=3))
    return torch.randint(0, 2, shape).to(draw(DTYPES))


TREES = st.recursive(
    st.one_of(CONSTANTS, tensors()),
    lambda children: st.one_of(
        st.lists(children, max_size=3),
        st.tuples(children, children),
        st.dictionaries(st.text(max_size=2), children, max_size=3),
    ),
    max_leaves=8,
)


def same(ours: Any, theirs: Any) -> bool:
    if isinstance(theirs, torch.Tensor):
        return ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    if isinstance(theirs, dict):
        return list(ours) == list(theirs) and all(same(ours[key], theirs[key]) for key in theirs)
    if isinstance(theirs, list | tuple):
        return type(ours) is type(theirs) and len(ours) == len(theirs) and all(map(same, ours, theirs))
    return type(ours) is type(theirs) and ours == theirs


@given(TREES)
def test_what_is_unpacked_is_what_was_packed(value: Any) -> None:
    form = form_of(value)
    with torch.no_grad():  # a lone output is else made to require a gradient, as the test below shows
        packed = form.pack(value)
    sent = (packed,) if isinstance(packed, torch.Tensor) else packed
    assert same(form.unpack(sent), value)
    assert [(e.shape, e.dtype) for e in form.examples()] == [(tensor.shape, tensor.dtype) for tensor in sent]
    assert form == form_of(value)


HIDDEN = torch.empty(2, 3)
DECLARED = {"hidden": HIDDEN, "layer": 3, "mask": None}


@pytest.mark.parametrize(
    "output",
    [
        {**DECLARED, "hidden": HIDDEN[:1]},
        {**DECLARED, "hidden": HIDDEN.bfloat16()},
        {**DECLARED, "hidden": None},
        {**DECLARED, "layer": 4},
        {**DECLARED, "layer": True},
        {**DECLARED, "mask": HIDDEN},
        [HIDDEN, 3, None],
    ],
)
def test_output_of_another_form_than_declared_is_refused(output: Any, wording: Callable[[str], None]) -> None:
    with pytest.raises(FormError) as error:
        form_of(DECLARED).pack(output)
    wording(str(error.value))
