"""The local cache: which shards nodes send each other, and when."""

from __future__ import annotations

from runner.load.local_cache import Transfer, Wanted, plan_transfers, waves_of


def test_ranks_have_one_transfer_in_a_wave_in_the_order_of_all() -> None:
    pairs = {"a": (0, 1), "b": (2, 3), "c": (1, 2), "d": (0, 4), "e": (3, 4)}
    transfers = [Transfer(path=path, sender=first, receivers=(second,)) for path, (first, second) in pairs.items()]
    assert [[transfer.path for transfer in wave] for wave in waves_of(transfers)] == [["a", "b"], ["c", "d"], ["e"]]


def test_cached_shard_is_sent_from_its_node_and_each_other_is_read_once() -> None:
    wanted = {
        rank: [Wanted(path=path, nbytes=8, is_cached=(rank, path) == (1, "b")) for path in "abc"] for rank in range(3)
    }
    transfers = {transfer.path: transfer for transfer in plan_transfers(wanted)}
    assert (transfers["b"].sender, transfers["b"].receivers) == (1, (0, 2))
    assert transfers["a"].sender != transfers["c"].sender
    assert all(transfer.ranks == (0, 1, 2) for transfer in transfers.values())
    assert plan_transfers({0: wanted[0], 1: []}) == ()
