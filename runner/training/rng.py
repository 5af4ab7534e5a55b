"""The RNG state of a rank: seeded at the start, saved in checkpoints, restored from them."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b

import torch

from manifests.errors import CheckpointError
from manifests.schema import RandomState


def seed_rng(seed: int, rank: int, step: int = 0) -> None:
    """Seed this rank's generator, which dropout draws from: from the run's seed, the rank, and the steps before."""
    # A generator uses 32 bits of its seed: hash all numbers into them.
    mixed = blake2b(f"{seed} rank {rank}{f' step {step}' * (step > 0)}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(mixed, "little"))


def rng_state(rank: int, device: torch.device) -> RandomState:
    """Return the state of the generator that this rank draws from."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    text = base64.b64encode(state.numpy().tobytes()).decode()
    return RandomState(rank=rank, generator=device.type, state=text)


def restore_rng(
    states: Sequence[RandomState], rank: int, num_ranks: int, device: torch.device, num_alike: int = 1
) -> bool:
    """Restore the RNG state of a run that had as many ranks on the same kind of device; False: another run.

    So many consecutive ranks draw alike, whatever degrees that run had: they get the state of the first of them. It is
    another run, too, if others drew alike in it, and would do so from now on.
    """
    mine = {state.rank: state.state for state in states if state.generator == device.type}
    if sorted(mine) != list(range(num_ranks)):
        return False
    firsts = range(0, num_ranks, num_alike)
    if len({mine[first] for first in firsts}) < len(firsts):
        return False
    try:
        stored = mine[rank - rank % num_alike]
        state = torch.frombuffer(bytearray(base64.b64decode(stored, validate=True)), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(
            "training.random",
            f"expected the RNG state of a {device.type} generator for rank {rank}, found something else",
            code="checkpoint.rng-state",
        ) from error
    return True
