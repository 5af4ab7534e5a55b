"""Pickles as data: what CPython pickles is read, and a few bytes take neither long, nor much memory, nor effect."""

from __future__ import annotations

import io
import pickle
import sys
import tracemalloc
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from manifests.errors import SourceError
from reshard.archives.pickled import BadPickleError, Record, read_pickle
from reshard.archives.tensors import VALUES, ArchiveDtype, read_object, read_value
from stores.local import LocalFile

NUMBERS = st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats(allow_nan=False)
PLAIN = st.recursive(
    NUMBERS | st.text() | st.binary(),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=20,
)
SIZE, FLOAT = b"\x8c\x05torch\x8c\x04Size\x93\x94", b"\x8c\x05torch\x8c\x07float32\x93"
MOST_NBYTES = 16 << 20


@settings(max_examples=60, deadline=None)
@given(PLAIN, st.integers(4, 5))
def test_what_cpython_pickles_is_read(value: object, protocol: int) -> None:
    assert repr(read_pickle(pickle.dumps(value, protocol), VALUES)) == repr(value)


def doubled(first: bytes, again: bytes, times: int) -> bytes:
    """Return the opcodes of a value that has another twice, which has another twice, and so on."""
    return first + b"\x94" + b"".join(again % (number, number) for number in map(bytes, zip(range(times))))


@pytest.mark.parametrize("times", [28, 200])
@pytest.mark.parametrize("used", [b"}h%cNs.", b"\x8f(h%c\x90.", b"(h%c\x91.", b"}h%c\x85Ns."])
def test_tuples_that_repeat_each_other_are_not_hashed(times: int, used: bytes) -> None:
    data = b"\x80\x04" + doubled(b"K\x01\x85", b"h%bh%b\x86\x94", times) + used % times
    with pytest.raises(BadPickleError):
        read_pickle(data, VALUES)


def test_tuples_in_tuples_that_are_few_are_read() -> None:
    value = (1,)
    for _ in range(30):
        value = (value, 2)  # type: ignore[assignment]
    assert read_pickle(pickle.dumps({value: 1}, 4), VALUES) == {value: 1}
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04}" + b")" + b"\x85" * 5000 + b"Ns.", VALUES)
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04)\x94" + b"h\x00\x85\x94" * 200 + b"}" + b")" + b"\x85" * 5000 + b"Ns.", VALUES)


def alike(count: int) -> list[int]:
    return [number * sys.hash_info.modulus for number in range(count)]


@pytest.mark.parametrize(
    "keys_of",
    [
        lambda count: dict.fromkeys(alike(count)),
        lambda count: set(alike(count)),
        lambda count: frozenset(alike(count)),
        lambda count: dict.fromkeys((number, 0) for number in range(count)),
        lambda count: [{(number, 0): 0} for number in range(count)],
    ],
)
def test_keys_that_may_collide_are_few(keys_of: Callable[[int], object]) -> None:
    assert set(map(hash, alike(9))) == {0}
    assert read_pickle(pickle.dumps(keys_of(500), 4), VALUES) == keys_of(500)
    with pytest.raises(BadPickleError):
        read_pickle(pickle.dumps(keys_of(6_000), 4), VALUES)


LONG = b"](" + b"K\x01" * 20_000 + b"e\x94"
FIELDS = b"}(" + b"".join(b"M%bN" % number.to_bytes(2, "little") for number in range(20_000)) + b"u"


@pytest.mark.parametrize(
    "data",
    [
        SIZE + LONG + b"\x85\x94" + b"h\x00h\x02R" * 1000,
        SIZE + LONG + b"\x85\x94" + b"h\x00h\x02\x81" * 1000,
        b"ccollections\nOrderedDict\n\x94" + LONG + b"\x85\x94" + b"h\x00h\x02R" * 1000,
        b"ca\nb\n\x94N" + FIELDS + b"\x86\x94" + b"h\x00)\x81h\x01b" * 200,  # the state of `__slots__`
    ],
)
def test_a_list_that_is_used_many_times_is_not_copied(data: bytes) -> None:
    tracemalloc.start()
    try:
        assert isinstance(read_pickle(b"\x80\x04" + data + b".", VALUES, Record), Record)
    except BadPickleError:
        pass
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_NBYTES


@pytest.mark.parametrize("state", [b"\x8c\x03F64\x85", b"N}\x8c\x04name\x8c\x03F64s\x86", b"}\x8c\x04name\x8c\x03F64s"])
@pytest.mark.parametrize("name", [FLOAT, b"\x94h\x00".join((FLOAT, b""))])
def test_what_is_named_is_not_changed(state: bytes, name: bytes) -> None:
    with pytest.raises(BadPickleError):
        read_pickle(b"\x80\x04" + name + state + b"b.", VALUES)
    assert VALUES["torch.float32"] == ArchiveDtype("F32")


@pytest.mark.parametrize("data", [doubled(b"]", b"](h%bh%be\x94", 40), b"]" * 5000 + b"a" * 4999, b"]\x94h\x00a"])
def test_values_whose_comparison_would_take_long_are_refused(data: bytes, tmp_path: Path) -> None:
    written = io.BytesIO()
    with zipfile.ZipFile(written, "w") as archive:
        archive.writestr("x/data.pkl", b"\x80\x04" + data + b".")
    (tmp_path / "value.pt").write_bytes(written.getvalue())
    file = LocalFile(tmp_path / "value.pt")
    for read in (lambda: read_value(file, (0, file.nbytes)), lambda: read_object(file, "value")):
        with pytest.raises(SourceError) as raised:
            read()
        assert raised.value.code == "source.bad-pickle"
