"""Process groups in this process, for what runs collectives."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture
def one_rank() -> Iterator[None]:
    from torch import distributed as dist  # slow to import, and most tests do without

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def two_ranks() -> Iterator[None]:
    """Ranks whose collectives return at once, with anything."""
    from torch import distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield
    dist.destroy_process_group()
