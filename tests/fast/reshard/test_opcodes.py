"""The quick look at long pickles: what it passes is read as if it had been checked opcode by opcode."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from reshard.archives import opcodes
from reshard.archives.pickled import BadPickleError, Record, read_pickle

METADATA = (Path(__file__).parents[2] / "data" / "megatron" / "deepseek-v3" / ".metadata").read_bytes()
MOST = 1 << 20


@pytest.fixture(autouse=True, scope="module")
def of_any_length() -> object:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opcodes, "_LEAST_NBYTES", 0)
        yield


def outcome(data: bytes) -> object:
    """Return what is read of a pickle, as text; None if it is refused."""
    try:
        return repr(shown(read_pickle(data, {"torch.Size": tuple}, Record)))
    except BadPickleError:
        return None


def shown(value: object) -> object:
    if isinstance(value, Record):
        return {"record": shown(value.fields)}
    if isinstance(value, dict):
        return [(shown(key), shown(each)) for key, each in value.items()]
    return [shown(each) for each in value] if isinstance(value, list | tuple) else value


def test_metadata_of_megatron_core_is_plain() -> None:
    assert opcodes.is_plain(METADATA, MOST)
    assert not opcodes.is_plain(METADATA, 100)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)


@settings(max_examples=40, deadline=None)
@given(VALUES, st.integers(4, 5))
def test_plain_values_are_read(value: object, protocol: int) -> None:
    assert outcome(pickle.dumps(value, protocol)) == repr(shown(value))


@settings(max_examples=20, deadline=None)
@given(
    st.integers(0, len(METADATA) - 1).flatmap(
        lambda at: st.tuples(st.just(at), st.binary(max_size=3), st.integers(0, 3))
    )
)
def test_damaged_metadata_is_read_as_by_the_exact_check(change: tuple[int, bytes, int]) -> None:
    at, put, removed = change
    data = METADATA[:at] + put + METADATA[at + removed :]
    found = outcome(data)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(opcodes, "_LEAST_NBYTES", 1 << 40)
        assert found == outcome(data)


@pytest.mark.parametrize(
    "data",
    [
        b"\x80\x04})" + b"\x85" * 5000 + b"Ns.",  # a key of tuples in tuples
        b"\x80\x04K\x01\x85\x94" + b"h\x00\x85" * 5000 + b".",  # by the memo
        b"\x80\x04]2.",  # DUP
        b"\x80\x04cos\nsystem\n.",
        b"\x80\x04}.}.",
        b"\x80\x04X\x05\x00\x00\x00hello.",
        b"\x80\x04]r\xff\xff\xff\x7f.",
        b"\x80\x04\x8c\xffabc.",
        b"\x80\x04]",
    ],
)
def test_what_is_not_plain_is_left_to_the_exact_check(data: bytes) -> None:
    assert not opcodes.is_plain(data, MOST)
