"""Kills, signals, outages and failing disks of publishers and receivers: no torn weights, and a rerun ends well.

What a chain has is read by `slime_decoder`, and what a folder has as transformers does: `model.safetensors` first, then
the shards of the index.
"""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.builders import INDEX, files_in
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import weights_in, write_states
from tests.process.events import Worker, acts_of, chunks_of, emptied, start_worker
from tests.process.stores.objects.buckets import BUCKET, url_of
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.timeout(1200)

# Each is run on a chain of these versions: what it makes of it, or of a folder at a version.
PUBLISHED = {"full": 0, "delta": 2, "fold": 3}
RECEIVED = {"new": (None, 3), "forward": (1, 4), "back": (4, 2), "one file": (1, 3)}
OPERATIONS = (*PUBLISHED, *RECEIVED, "prune")
BUCKET_OPERATIONS = ("full", "delta", "new", "forward")
BUCKET_ACTS = (*(("SIGKILL", 1),) * 3, ("SIGTERM", 1), ("503", 1), ("500", 1), ("403", 1), ("403", 9999))
NUM_EVENTS, NUM_LOCAL = 8, 700
NUM_BUCKET_SAMPLE, NUM_BUCKET = 2, 300
NUM_STATES = 4
CODES = (0, 3, 5, 130, -9, -15)

State = Mapping[str, bytes]


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A folder with `v1` to `v4`, the `chain` of them, and `served1` and so on; `single` is `v1` in one file."""

    folder: Path
    states: list[State]


@pytest.fixture(scope="module")
def worker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    with start_worker(tmp_path_factory.mktemp("said") / "said", {}) as started:
        yield started


@pytest.fixture(scope="module")
def place(worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Place:
    folder = tmp_path_factory.mktemp("events")
    states = list(write_states(folder, NUM_STATES))
    write_states(folder / "single", 1, num_shards=1)
    for number in range(1, NUM_STATES + 1):
        assert worker.run("delta", "publish", folder / f"v{number}", "--chain", folder / "chain")[0] == 0
    for number in {before for before, _ in RECEIVED.values() if before is not None}:
        to = folder / f"served{number}"
        assert worker.run("delta", "apply", folder / "chain", "--to", to, "--version", number)[0] == 0
    return Place(folder=folder, states=states)


def readable(folder: Path) -> State | None:
    """Return the weights that `from_pretrained` reads; None if it finds none."""
    if (folder / "model.safetensors").is_file():
        return {name: slice_of(folder / "model.safetensors", name) for name in names_in(folder / "model.safetensors")}
    if not (folder / INDEX).is_file():
        return None
    weight_map = json.loads((folder / INDEX).read_text())["weight_map"]
    if [*weight_map] == [""]:  # auxiliary files are being replaced
        assert not (folder / weight_map[""]).exists()
        return None
    return {name: slice_of(folder / shard, name) for name, shard in weight_map.items()}


def names_in(path: Path) -> list[str]:
    return [name for name in slime_decoder.read_file(path)[0] if name != "__metadata__"]


def slice_of(path: Path, name: str) -> bytes:
    header, data = slime_decoder.read_file(path)
    begin, end = header[name]["data_offsets"]
    return data[begin:end]


def states_of(chain: Path) -> dict[int, State]:
    """Return the state of each version that has an index, as slime's receiver decodes it."""
    states = {}
    for version in sorted(chain.glob("weight_v*")):
        if (version / INDEX).is_file():
            number = int(version.name.removeprefix("weight_v"))
            with emptied(chain.parent / f"pulled{number}") as pulled:
                pulled.rmdir()
                slime_decoder.pull(pulled, pulled, chain, number)
                states[number] = weights_in(pulled)
    return states


def begin(place: Place, operation: str, folder: Path) -> tuple[tuple[object, ...], Path]:
    """Return a command and the folder that it changes, as it is before."""
    if operation in RECEIVED:
        before, after = RECEIVED[operation]
        if before is not None:
            source = place.folder / ("single/v1" if operation == "one file" else f"served{before}")
            shutil.copytree(source, folder / "served")
        to = folder / "served"
        return ("delta", "apply", place.folder / "chain", "--to", to, "--version", after, "--quiet"), to
    chain = folder / "chain"
    shutil.copytree(place.folder / "chain", chain)
    for number in range(1 + PUBLISHED.get(operation, NUM_STATES), NUM_STATES + 1):
        shutil.rmtree(chain / f"weight_v{number:06d}")
    if operation == "fold":
        return ("delta", "fold", chain, "--quiet"), chain
    if operation == "prune":
        shutil.copytree(chain / "weight_v000001", chain / "weight_v000005")  # state 1 again, as a full version
        return ("delta", "prune", chain, "--keep", 1, "--quiet"), chain
    source = place.folder / f"v{1 + PUBLISHED[operation]}"
    return ("delta", "publish", source, "--chain", chain, "--quiet"), chain


def expected(place: Place, operation: str) -> tuple[list[State | None], dict[int, State]]:
    """Return what a folder may have, the last of which it has in the end; or what a chain has in the end."""
    if operation in RECEIVED:
        before, after = RECEIVED[operation]
        return [None if before is None else place.states[before - 1], place.states[after - 1]], {}
    if operation == "prune":
        return [], {5: place.states[0]}
    return [], dict(enumerate(place.states[: PUBLISHED[operation] + (operation != "fold")], 1))


def check(place: Place, operation: str, target: Path, context: str, *, is_done: bool) -> None:
    allowed, versions = expected(place, operation)
    if operation in RECEIVED:
        weights = readable(target)
        assert weights in (allowed[-1:] if is_done else allowed), context
        return
    states = states_of(target)
    if operation == "prune":
        assert states[5] == versions[5], context
        assert not is_done or states == versions, context
        return
    if operation == "fold":  # each that finished, killed or not, is another version
        folded = [states.pop(number) for number in [*states] if number not in versions]
        assert states == versions, context
        assert all(state == versions[PUBLISHED["fold"]] for state in folded), context
        assert folded or not is_done, context
        return
    last = max(versions)
    assert states == versions or (not is_done and states == {n: versions[n] for n in versions if n != last}), context


def strike(place: Place, worker: Worker, seed: int, folder: Path) -> None:
    """Strike a command once or twice, and run it again."""
    chance, operation = random.Random(seed), OPERATIONS[seed % len(OPERATIONS)]
    command, target = begin(place, operation, folder)
    context = ""
    for act in acts_of(seed, OPERATIONS, chance):
        at = int(chance.paretovariate(0.6)) - 1 if chance.random() < 0.5 else chance.randrange(60)
        at = chance.randrange(200) if act == "later" else at
        code, _ = worker.run(*command, act=act, at=at)
        context = f"seed {seed}: {operation}, {act} at change {at}, code {code}: {worker.said.read_text()}"
        assert code in CODES, context
        check(place, operation, target, context, is_done=code == 0)
        if code == 0:
            break
    code, _ = worker.run(*command)
    text = worker.said.read_text()
    assert code == 0, (context, text)
    check(place, operation, target, f"{context}, then {text}", is_done=True)
    others = [name for name in files_in(target) if name.startswith((".cache", ".publish")) or ".partial" in name]
    assert others == [], context


@pytest.mark.parametrize("seeds", chunks_of(NUM_LOCAL, NUM_EVENTS, 116))
def test_struck_publisher_or_receiver_leaves_whole_weights_and_ends_well_when_it_is_run_again(
    seeds: range, place: Place, worker: Worker, tmp_path: Path
) -> None:
    failed, before = [], files_in(place.folder)
    for seed in seeds:
        with emptied(tmp_path / str(seed)) as folder:
            try:
                strike(place, worker, seed, folder)
            except AssertionError as error:
                failed.append(f"{seed}: {error}")
    assert failed == []
    assert files_in(place.folder) == before, "a source has changed"


@pytest.fixture(scope="module")
def bucket_worker(moto_server: MotoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}
    environment = {**moto_server.environment(), **nowhere}
    with start_worker(tmp_path_factory.mktemp("said") / "said", environment, "buckets") as started:
        yield started


def download(moto: MotoServer, name: str, folder: Path) -> Path:
    for key, data in moto.objects(BUCKET, f"{name}/").items():
        path = folder / key.removeprefix(f"{name}/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)
    return folder


def strike_bucket(place: Place, worker: Worker, seed: int, moto: MotoServer, folder: Path) -> None:
    chance, operation, name = random.Random(seed), BUCKET_OPERATIONS[seed % len(BUCKET_OPERATIONS)], f"chain-{seed}"
    command, target = begin(place, operation, folder)
    chain = place.folder / "chain" if operation in RECEIVED else target
    for path, data in files_in(chain).items():
        moto.client().put_object(Bucket=BUCKET, Key=f"{name}/{path}", Body=data)
    command = tuple(url_of(name) if part == chain else part for part in command)
    act, times = acts_of(seed, BUCKET_OPERATIONS, chance, BUCKET_ACTS)[0]
    struck = {"act": act, "at": chance.randrange(40), "times": times, "is_done": chance.random() < 0.5}
    code, _ = worker.run(*command, strike=struck, endpoint=moto.endpoint)
    moto.settle()
    context = f"seed {seed}: {operation}, {struck}, code {code}: {worker.said.read_text()}"
    assert code in CODES, context
    for is_done in (code == 0, True):
        here = target if operation in RECEIVED else download(moto, name, folder / f"downloaded{is_done}")
        check(place, operation, here, context, is_done=is_done)
        shutil.rmtree(folder / f"downloaded{is_done}", ignore_errors=True)
        if not is_done or code == 0:
            code, _ = worker.run(*command)
            assert code == 0, (context, worker.said.read_text())


@pytest.mark.parametrize("seeds", chunks_of(NUM_BUCKET, NUM_BUCKET_SAMPLE, 49))
def test_struck_chain_in_a_bucket_goes_on(
    seeds: range, place: Place, bucket_worker: Worker, moto: MotoServer, tmp_path: Path
) -> None:
    failed = []
    for seed in seeds:
        with emptied(tmp_path / str(seed)) as folder:
            try:
                strike_bucket(place, bucket_worker, seed, moto, folder)
            except AssertionError as error:
                failed.append(f"{seed}: {error}")
        for key in moto.objects(BUCKET, f"chain-{seed}/"):
            moto.client().delete_object(Bucket=BUCKET, Key=key)
    assert failed == []


def test_late_joiner_fetches_each_delta_of_a_bucket_once(
    place: Place, bucket_worker: Worker, moto: MotoServer, tmp_path: Path
) -> None:
    for path, data in files_in(place.folder / "chain").items():
        moto.client().put_object(Bucket=BUCKET, Key=f"late/{path}", Body=data)
    assert bucket_worker.run("delta", "apply", url_of("late"), "--to", tmp_path / "served")[0] == 0
    assert readable(tmp_path / "served") == place.states[-1]
    for number in range(2, NUM_STATES + 1):
        path = f"/{BUCKET}/late/weight_v{number:06d}/model-00001-of-00001.safetensors"
        assert len(moto.requests("GET", path)) == 1, number
    assert not files_in(tmp_path / "served/.cache")


def test_prefix_of_the_whole_name_comes_before_a_version(
    place: Place, bucket_worker: Worker, moto: MotoServer, tmp_path: Path
) -> None:
    for folder, name in (("chain", "named"), ("v3", "named@2")):
        for path, data in files_in(place.folder / folder).items():
            moto.client().put_object(Bucket=BUCKET, Key=f"{name}/{path}", Body=data)
    for version, number in ((1, 1), (2, 3)):
        out = tmp_path / str(version)
        pack = ("pack", url_of(f"named@{version}"), "--layout", "pp=1", "--out", out)
        assert bucket_worker.run(*pack)[0] == 0
        assert weights_in(out) == place.states[number - 1]
