"""Fuzz target: source.json. What the decoder takes, it writes, and reads again as the same record."""

from __future__ import annotations

from manifests.errors import InputError
from reshard.tensors.source_index import KeptText, RecordedShard, SourceRecord, decode_record, record_blocks

_ENTRY = '{"dtype":"U8","shape":[1],"data_offsets":[0,1]}'


def check(text: bytes) -> None:
    """Raise AssertionError unless the text is refused, or decode and encode agree on it."""
    try:
        record = decode_record(text)
    except InputError:
        return
    written = b"".join(record_blocks(record))
    again = decode_record(written)
    assert again == record
    assert b"".join(record_blocks(again)) == written


def seeds() -> tuple[bytes, ...]:
    """Give a model of one file, and one of two with an index and a tensor left behind."""
    one = SourceRecord(shards=(RecordedShard("model.safetensors", f'{{"a":{_ENTRY}}}'),))
    two = SourceRecord(
        shards=(RecordedShard("a.safetensors", f'{{"a":{_ENTRY}}}'), RecordedShard("b.safetensors", "{}")),
        index=KeptText(b'{"weight_map": {"a": "a.safetensors"}}'),
        dropped=("a",),
    )
    return b"".join(record_blocks(one)), b"".join(record_blocks(two))
