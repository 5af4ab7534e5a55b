"""Objects that are not ours, in and around an output in a bucket: no command may touch them."""

from __future__ import annotations

from typing import Any

_INSIDE = {
    "notes.txt": b"mine",
    "thesis.pdf": b"%PDF",
    "nested/pytorch_model.bin": b"pickled",
    ".git/HEAD": b"ref: refs/heads/main\n",
    "nested/step-000010/manifest.json": b'{"format": "theirs"}',
    "nested/step-000010/stage-000/model.safetensors": b"theirs",
    "nested/step-000020/.reshard-unfinished": b"another writer's claim",
    "stage-000/notes.txt": b"beside a shard of ours",
    "nested/adapter_model.safetensors": b"an adapter",
    "name with spaces \N{SNOWMAN}": b"snow",
    "empty": b"",
    "folder/": b"",  # as web consoles mark folders
}
_AROUND = {"-more/config.json": b"{}", ".txt": b"a file of nearly this name", "0/manifest.json": b"{}"}


class ObjectSentinels:
    """What was planted in a bucket: whole keys, with the etag and time of each object."""

    def __init__(self, client: Any, bucket: str, keys: list[str]) -> None:
        self._client, self._bucket, self._keys = client, bucket, keys
        self._before = self._seen()

    def _seen(self) -> dict[str, tuple[str, str]]:
        pages = self._client.get_paginator("list_objects_v2").paginate(Bucket=self._bucket)
        listed = {item["Key"]: item for page in pages for item in page.get("Contents", ())}
        return {key: (listed[key]["ETag"], str(listed[key]["LastModified"])) for key in self._keys if key in listed}

    def check(self) -> None:
        """Assert that all of them are there as they were."""
        now = self._seen()
        assert [key for key in self._keys if now.get(key) != self._before[key]] == []


def plant_objects(client: Any, bucket: str, prefix: str, *, inside: bool = True) -> ObjectSentinels:
    """Put notes, another checkpoint, names like ours and empty objects around a prefix, and below it."""
    named = {prefix + name: data for name, data in _AROUND.items()}
    named |= {f"{prefix}/{name}": data for name, data in _INSIDE.items()} if inside else {}
    for key, data in named.items():
        client.put_object(Bucket=bucket, Key=key, Body=data)
    return ObjectSentinels(client, bucket, list(named))


def is_planted(name: str) -> bool:
    """Whether a name below the prefix is one of those that were planted."""
    return name in _INSIDE
