"""A packed model, and a server of buckets, empty for each module; a test that asks for it has its environment on.

What these are made of is imported here only when a test asks: the others need no client of S3.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.servers.s3 import MotoServer


# `--dist loadfile` gives a file to one worker: of those that take long, none may be begun last.
LONGEST = (
    "test_matrix.py", "test_plants.py", "test_parallel.py", "test_pages.py", "test_resume.py", "test_flipped_bits.py",
    "test_objects.py", "test_mtp.py", "test_bucket_parts.py", "test_own_losses.py",
    "test_catalogue_trained.py", "test_object_pack.py", "test_parity.py", "test_bucket_events.py", "test_events.py",
    "test_families.py", "test_lock_files.py", "test_own_flags.py", "test_publish.py", "test_faults.py",
    "test_prove.py", "test_reading.py", "test_launch.py", "test_hostile_folder.py", "test_conversion_memory.py",
    "test_signals.py", "test_delta_events.py", "test_local_job.py", "test_training.py", "test_saving_faults.py",
    "test_eval_nodes.py", "test_life.py", "test_object_resuming.py", "test_optimizers.py", "test_supervise.py",
)  # fmt: skip


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker("process")
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(300))
    order = {name: place for place, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get(item.path.name, len(order)))


@pytest.fixture(scope="session")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied model, packed for two ranks; tests change copies of it."""
    from tests.process.local_jobs import pack_tiny

    return pack_tiny(tmp_path_factory.mktemp("models"), 2)


@pytest.fixture(scope="session")
def packed_alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same for one rank: each takes seven seconds of processor time to import what it needs."""
    from tests.process.local_jobs import pack_tiny

    return pack_tiny(tmp_path_factory.mktemp("models"), 1)


@pytest.fixture(scope="session")
def started_moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MotoServer]:
    from tests.process.stores.objects.buckets import BUCKET
    from tests.servers.s3 import start_moto

    with start_moto(tmp_path_factory.mktemp("moto")) as server:
        server.bucket(BUCKET)
        yield server


@pytest.fixture(scope="module")
def moto_server(started_moto: MotoServer) -> MotoServer:
    """One server for all modules, each of which finds it empty."""
    started_moto.empty()
    return started_moto


@pytest.fixture
def moto(moto_server: MotoServer, monkeypatch: pytest.MonkeyPatch) -> Iterator[MotoServer]:
    """Give the server that logs its requests and fails on demand."""
    from tests.process.stores.objects.buckets import become

    become(monkeypatch, moto_server.environment())
    yield moto_server
    moto_server.fail()
