"""A rank's random numbers: where they begin, and their states, kept in checkpoints."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from hashlib import blake2b

import torch

from manifests.errors import CheckpointError
from manifests.schema import RandomState

__all__ = ["begin_random", "random_state", "restore_random"]


def begin_random(seed: int, rank: int) -> None:
    """Draw from here on random numbers of this rank's own, the same for the same seed and rank: what dropout draws."""
    # A generator takes up 32 bits of its seed: stir both numbers into them.
    stirred = blake2b(f"{seed} rank {rank}".encode(), digest_size=4).digest()
    torch.manual_seed(int.from_bytes(stirred, "little"))


def random_state(rank: int, device: torch.device) -> RandomState:
    """Give the state of the generator that this rank draws from."""
    state = torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()
    text = base64.b64encode(state.numpy().tobytes()).decode()
    return RandomState(rank=rank, generator=device.type, state=text)


def restore_random(states: Sequence[RandomState], rank: int, num_ranks: int, device: torch.device) -> bool:
    """Go on with the random numbers of a run that had as many ranks on the same kind of device, or give False.

    Raises:
        InputError: this rank's state is none.
    """
    mine = {state.rank: state.state for state in states if state.generator == device.type}
    if sorted(mine) != list(range(num_ranks)):
        return False
    try:
        state = torch.frombuffer(bytearray(base64.b64decode(mine[rank], validate=True)), dtype=torch.uint8)
        if device.type == "cuda":
            torch.cuda.set_rng_state(state, device)
        else:
            torch.set_rng_state(state)
    except (ValueError, RuntimeError) as error:
        raise CheckpointError(
            "training.random",
            f"the state of rank {rank} is none of a {device.type} generator",
            code="checkpoint.rng-state",
        ) from error
    return True
