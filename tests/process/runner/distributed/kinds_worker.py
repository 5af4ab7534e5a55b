"""A rank that checks whether all have a device of its kind, for some kinds; it prints how each check ends."""

from __future__ import annotations

import os

import torch

from manifests.errors import UserError
from runner.distributed.world import World, check_same_kind, join_world


def main() -> None:
    world = World.from_environment(os.environ)
    join_world(torch.device("cpu"), timeout_s=60)
    for kinds in (("cpu", "cpu"), ("cuda", "cuda"), ("cuda", "cpu")):
        try:
            check_same_kind(torch.device(kinds[world.rank]))
            print("same kind", flush=True)
        except UserError as error:
            print(f"{error.code} of {error.where.partition(':')[0]}", flush=True)


if __name__ == "__main__":
    main()
