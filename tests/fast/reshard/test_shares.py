"""Who packs what, when there is much of it."""

from __future__ import annotations

from manifests.safetensors import layout_tensors
from reshard.plans.pack_plan import OutputShard
from reshard.plans.partition import deal
from tests.steps import steps_of


def shard_of(num_tensors: int) -> OutputShard:
    """Give a shard of tensors that each fill sectors of their own, as a quantized layer's experts do."""
    entries = layout_tensors((f"model.layers.0.mlp.experts.{i}.w1", "BF16", (64, 64)) for i in range(num_tensors))
    return OutputShard(path="a", origins=(), header_nbytes=0, given=(b"", entries))


def test_steps_to_deal_grow_with_the_tensors_and_not_with_their_square() -> None:
    few, many = shard_of(4000), shard_of(16000)
    for shard in (few, many):
        (share,) = deal([shard], 1)[0]
        assert len(share.names) == len(shard.entries)
    assert steps_of(lambda: deal([many], 1)) < 4.5 * steps_of(lambda: deal([few], 1))
