"""Fuzz target: source.json. What the decoder takes, it writes, and reads again as the same record."""

from __future__ import annotations

from manifests.errors import InputError
from reshard.tensors.source_index import RecordedShard, SourceRecord, decode_record, encode_record

_ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def check(text: bytes) -> None:
    """Raise AssertionError unless the text is refused, or decode and encode agree on it."""
    try:
        record = decode_record(text)
    except InputError:
        return
    written = encode_record(record)
    again = decode_record(written)
    assert again == record
    assert encode_record(again) == written


def seeds() -> tuple[bytes, ...]:
    """Give a model of one file, and one of two with an index and a tensor left behind."""
    one = SourceRecord(shards=(RecordedShard("model.safetensors", f'{{"a":{_ENTRY}}}'.encode()),))
    two = SourceRecord(
        shards=(RecordedShard("a.safetensors", f'{{"a":{_ENTRY}}}'.encode()), RecordedShard("b.safetensors", b"{}")),
        index=b'{"weight_map": {"a": "a.safetensors"}}',
        dropped=("a",),
    )
    return encode_record(one), encode_record(two)
