"""Nested values as tensors on a wire, and back."""

from __future__ import annotations

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
    packed = form.pack(value)
    sent = (packed,) if isinstance(packed, torch.Tensor) else packed
    assert same(form.unpack(sent), value)
    assert [(e.shape, e.dtype) for e in form.examples()] == [(tensor.shape, tensor.dtype) for tensor in sent]
    assert form == form_of(value)


def test_every_tensor_that_leaves_is_one_of_its_own() -> None:
    arrived, base = torch.randn(2, 3, requires_grad=True), torch.randn(4, 3)
    value = {"same": arrived, "twice": [base, base], "view": base[:2], "turned": torch.randn(2, 3).t().detach()}
    packed = form_of(value).pack(value, [arrived])
    assert isinstance(packed, tuple)
    storages = {tensor.untyped_storage().data_ptr() for tensor in (*packed, arrived)}
    assert len(storages) == len(packed) + 1
    assert all(tensor.is_contiguous() and not tensor._is_view() for tensor in packed)
    assert packed[1] is base  # nothing is copied without need
    packed[0].sum().backward()
    assert arrived.grad is not None


HIDDEN = torch.empty(2, 3)
AGREED = {"hidden": HIDDEN, "layer": 3, "mask": None}


@pytest.mark.parametrize(
    ("handed_on", "message"),
    [
        ({**AGREED, "hidden": HIDDEN[:1]}, "a stage hands on float32 [1, 3], expected float32 [2, 3]"),
        ({**AGREED, "hidden": HIDDEN.bfloat16()}, "a stage hands on bfloat16 [2, 3], expected float32 [2, 3]"),
        ({**AGREED, "hidden": None}, "a stage hands on None, expected float32 [2, 3]"),
        ({**AGREED, "layer": 4}, "a stage hands on 4, expected 3 as for every microbatch"),
        ({**AGREED, "layer": True}, "a stage hands on True, expected 3 as for every microbatch"),
        ({**AGREED, "mask": HIDDEN}, "a stage hands on float32 [2, 3], expected None as for every microbatch"),
    ],
)
def test_other_leaves_than_agreed_are_refused(handed_on: Any, message: str) -> None:
    with pytest.raises(FormError) as error:
        form_of(AGREED).pack(handed_on)
    assert str(error.value) == message


def test_another_structure_than_agreed_is_refused() -> None:
    with pytest.raises(FormError, match=r"a stage hands on .*list.*, expected .*dict"):
        form_of(AGREED).pack([HIDDEN, 3, None])
