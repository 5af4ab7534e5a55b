"""Who packs what, when there is much of it."""

from __future__ import annotations

import time

from manifests.safetensors import layout_tensors
from reshard.plan import OutputShard
from reshard.shares import deal


def shard_of(num_tensors: int) -> OutputShard:
    """Give a shard of tensors that each fill sectors of their own, as a quantised layer's experts do."""
    entries = layout_tensors((f"model.layers.0.mlp.experts.{i}.w1", "BF16", (64, 64)) for i in range(num_tensors))
    return OutputShard(path="a", header=b"", entries=entries, origins=(), with_digests=False)


def test_time_to_deal_grows_with_the_tensors_and_not_with_their_square() -> None:
    few, many = shard_of(4000), shard_of(16000)

    def took_s(shard: OutputShard) -> float:
        took = []
        for _ in range(3):
            begun_s = time.process_time()
            (share,) = deal([shard], 1)[0]
            took.append(time.process_time() - begun_s)
            assert len(share.names) == len(shard.entries)
        return min(took)

    assert took_s(many) / took_s(few) < 4 * 2.4  # 16 if it grew with their square
