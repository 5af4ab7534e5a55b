"""Kills, signals, outages and refusals at any request to a bucket: others' objects stay, and a rerun resumes."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from stores.base import LOCK_NAME, PROGRESS_NAME
from tests.bucket_sentinels import ObjectSentinels, is_planted, plant_objects
from tests.builders import INDEX, files_in, llama_config, random_tensors, write_model
from tests.fast.trained import write_trained
from tests.process.events import NUM_BUCKET_EVENTS, NUM_PUSH_EVENTS, Worker, acts_of, chunks_of, start_worker
from tests.process.stores.objects.buckets import BUCKET, url_of
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.timeout(1200)

OPERATIONS = ("pack", "forced pack", "reshard", "forced reshard", "export", "forced export")
PUSHES = ("push", "forced push")  # of a training checkpoint whose shards are sent in parts
# What happens, and for how many requests: 503 is waited out, 403 is not, and one for good meets the clean-up, too.
ACTS = (
    *(("SIGKILL", 1),) * 4, ("SIGTERM", 1), ("SIGINT", 1), ("503", 1), ("503", 3), ("500", 1), ("403", 1), ("403", 9999)
)  # fmt: skip
NUM_EVENTS, NUM_PUSHED = 3, 1  # of `make test`
SIZES = {"hidden_size": 64, "intermediate_size": 96, "vocab_size": 34_000, "num_hidden_layers": 2}  # 8.7 MB a tensor
LAST_PUSH_REQUEST = 60
BEGUN = 20  # the request at which what a forced operation takes the place of was killed

Objects = dict[str, bytes]


@pytest.fixture(scope="module")
def worker(moto_server: MotoServer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worker]:
    nowhere = {"AWS_SHARED_CREDENTIALS_FILE": "/nowhere", "AWS_CONFIG_FILE": "/nowhere"}
    environment = {**moto_server.environment(), **nowhere}
    with start_worker(tmp_path_factory.mktemp("said") / "said", environment, "buckets") as started:
        yield started


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """A source here, bundles of it in the bucket, and what each operation makes of them."""

    folder: Path

    def command(self, operation: str, out: str) -> tuple[object, ...]:
        force = ("--force",) if operation.startswith("forced") else ()
        if operation.endswith("reshard"):
            return ("pack", url_of("packed"), "--layout", "pp=4", "--out", out, "--quiet", *force)
        if operation.endswith("push"):
            return ("pack", self.folder / "training/trained", "--layout", "pp=2", "--out", out, "--quiet", *force)
        if operation.endswith("export"):
            return ("export", url_of("packed"), "--to", "hf", "--out", out, "--quiet", *force)
        return ("pack", self.folder / "source", "--layout", "pp=3", "--out", out, "--quiet", *force)

    def expected(self, operation: str) -> Objects:
        return files_in(self.folder / operation.split()[-1])


@pytest.fixture(scope="module")
def place(moto_server: MotoServer, worker: Worker, tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model of shards that are sent in one piece each; and a training checkpoint, of which each is sent in parts."""
    place = Place(folder=tmp_path_factory.mktemp("events"))
    config = llama_config(hidden_size=64, intermediate_size=96, vocab_size=40000, num_hidden_layers=3)
    write_model(place.folder / "source", config, random_tensors(config), num_shards=3)
    assert worker.run("pack", place.folder / "source", "--layout", "pp=2", "--out", url_of("packed"))[0] == 0
    write_trained(place.folder / "training", "pp=1", **SIZES)
    for operation in (*OPERATIONS[::2], PUSHES[0]):
        code, _ = worker.run(*place.command(operation, str(place.folder / operation)))
        assert code == 0, worker.said.read_text()
    return place


class Output:
    """A prefix of the bucket, seen from outside."""

    def __init__(self, moto: MotoServer, name: str) -> None:
        self.moto, self.name, self.url = moto, name, url_of(name)

    def objects(self) -> Objects:
        """Return what is there of ours."""
        found = self.moto.objects(BUCKET, f"{self.name}/")
        named = {key.removeprefix(f"{self.name}/"): data for key, data in found.items()}
        return {name: data for name, data in named.items() if name and not is_planted(name)}

    def readable(self) -> Objects | None:
        """Return what a reader is given: None where there is nothing, or it is marked as unfinished.

        Readers of a manifest do not look at the index beside it.
        """
        found = self.objects()
        if "manifest.json" in found:
            document = json.loads(found["manifest.json"])
            shards = [shard["path"] for stage in document["stages"] for shard in stage["shards"]]
            named = ["manifest.json", *shards, *(each["path"] for each in document["files"])]
            return {name: found[name] for name in named}
        return None if LOCK_NAME in found or not found else found

    def recorded(self) -> dict[str, int]:
        """Return the completed objects of an unfinished output, by whole name, with their lengths."""
        found = self.objects()
        if not {LOCK_NAME, PROGRESS_NAME} <= found.keys():
            return {}
        return {name: nbytes for name, (nbytes, _) in json.loads(found[PROGRESS_NAME])["objects"].items()}

    def sent(self, since: int) -> dict[str, int]:
        """Return the bytes of shards sent since a line of the log, by name."""
        found: dict[str, int] = {}
        for line in self.moto.log.read_text().splitlines()[since:]:
            each = json.loads(line)
            name = each["path"].removeprefix(f"/{BUCKET}/{self.name}/")
            if each["method"] == "PUT" and name.endswith(".safetensors"):
                found[name] = found.get(name, 0) + each["received_nbytes"]
        return found

    def num_noted(self, since: int) -> int:
        """Return how often completed objects were noted since a line of the log."""
        lines = map(json.loads, self.moto.log.read_text().splitlines()[since:])
        notes = [each for each in lines if each["method"] == "PUT" and each["path"].endswith(PROGRESS_NAME)]
        return sum(each["status"] == 200 for each in notes)

    def log_length(self) -> int:
        return len(self.moto.log.read_text().splitlines())


def begin(place: Place, worker: Worker, operation: str, output: Output) -> ObjectSentinels:
    """Leave an unfinished output of another layout where a forced operation begins."""
    if operation.startswith("forced"):
        command = place.command(operation.split()[-1], output.url)
        command = tuple("pp=2" if arg in ("pp=3", "pp=4") else arg for arg in command)
        struck = {"act": "SIGKILL", "at": BEGUN, "times": 1, "is_done": True}
        assert worker.run(*command, strike=struck, endpoint=output.moto.endpoint)[0] == -9, worker.said.read_text()
        output.moto.settle()
        assert LOCK_NAME in output.objects()
    return plant_objects(output.moto.client(), BUCKET, output.name, inside=False)


def strike(
    place: Place, worker: Worker, seed: int, moto: MotoServer, operations: Sequence[str] = OPERATIONS, last: int = 80
) -> int:
    """Strike a command once or twice, before request `last`, and run it again; return the bytes not sent again."""
    chance, operation, output = random.Random(seed), operations[seed % len(operations)], Output(moto, f"event-{seed}")
    sentinels = begin(place, worker, operation, output)
    whole = place.expected(operation)
    expected = {name: data for name, data in whole.items() if name != INDEX or "manifest.json" not in whole}
    command, context, kept, num_saved = place.command(operation, output.url), "", {}, 0
    for act, times in acts_of(seed, operations, chance, ACTS):
        at, is_done, since = chance.randrange(last), chance.random() < 0.5, output.log_length()
        struck = {"act": act, "at": at, "times": times, "is_done": is_done}
        code, _ = worker.run(*command, strike=struck, endpoint=moto.endpoint)
        moto.settle()
        context = f"seed {seed}: {operation}, {act} at request {at}, code {code}: {worker.said.read_text()}"
        assert code in (0, 3, 130, -9, -15), context
        sentinels.check()
        assert output.readable() in (expected, None), context
        assert code != 0 or output.readable() == expected, context
        assert not kept.keys() & output.sent(since).keys(), context
        if output.readable() == expected:
            break
        kept = {name: nbytes for name, nbytes in output.recorded().items() if name in expected}
        # Each note but the first, and the one that says that the command has stopped, is of one more shard.
        assert len(kept) >= output.num_noted(since) - (1 if act == "SIGKILL" else 2) or LOCK_NAME not in (
            output.objects()
        ), context
    since, is_finished = output.log_length(), output.readable() == expected
    code, _ = worker.run(*command)
    said = worker.said.read_text()
    if is_finished:
        assert (code, "already exists" in said) == (3, True), (context, said)
    elif code != 0:  # it was killed before it could say whose plan it is
        assert "--force" in said, (context, said)
        code, _ = worker.run(*(each for each in command if each != "--force"), "--force")
        assert code == 0, (context, worker.said.read_text())
    elif kept:
        sent = output.sent(since)
        assert not kept.keys() & sent.keys(), (context, sent)
        total = sum(len(data) for name, data in expected.items() if name.endswith(".safetensors"))
        assert sum(sent.values()) <= total - sum(kept.values()), (context, sent)
        num_saved = sum(kept.values())
    assert output.readable() == expected, context
    working = (LOCK_NAME, PROGRESS_NAME) if is_finished else ()  # which a kill right after the commit leaves
    assert {name: data for name, data in output.objects().items() if name not in working} == whole, context
    sentinels.check()
    return num_saved


def strike_all(seeds: range, place: Place, worker: Worker, moto: MotoServer, operations: Sequence[str]) -> int:
    failed, num_saved, last = [], 0, 80 if operations is OPERATIONS else LAST_PUSH_REQUEST
    for seed in seeds:
        try:
            num_saved += strike(place, worker, seed, moto, operations, last)
        except AssertionError as error:
            failed.append(f"{seed}: {error}")
        for key in moto.objects(BUCKET, f"event-{seed}"):
            moto.client().delete_object(Bucket=BUCKET, Key=key)
    assert failed == []
    return num_saved


@pytest.mark.parametrize("seeds", chunks_of(NUM_BUCKET_EVENTS, NUM_EVENTS, 49))
def test_struck_command_touches_nothing_of_others_and_resumes_when_it_is_run_again(
    seeds: range, place: Place, worker: Worker, moto: MotoServer
) -> None:
    num_saved = strike_all(seeds, place, worker, moto, OPERATIONS)
    assert num_saved > 0 or len(seeds) < 20, "no rerun had anything to resume from"


@pytest.mark.parametrize("seeds", chunks_of(NUM_PUSH_EVENTS, NUM_PUSHED, 39))
def test_struck_push_of_a_training_checkpoint_in_parts_resumes_when_it_is_run_again(
    seeds: range, place: Place, worker: Worker, moto: MotoServer
) -> None:
    num_before = len(moto.requests("PUT", f"/{BUCKET}/event-"))
    strike_all(seeds, place, worker, moto, PUSHES)
    sent = moto.requests("PUT", f"/{BUCKET}/event-")[num_before:]
    assert any("partNumber=2" in request.query for request in sent), "no shard was sent in parts"
