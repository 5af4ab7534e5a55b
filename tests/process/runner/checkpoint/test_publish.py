"""Runs that publish: each version has the bytes of the checkpoint of its step, and restarts go on in the chain."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import pairwise
from pathlib import Path
from threading import Event
from typing import Any

import pytest
from torch import distributed as dist

import reshard
from manifests.digest import digest_bytes
from manifests.errors import InputError, OutputError
from manifests.schema import WEIGHTS
from manifests.versions import LOCK_NAME
from runner.bundle.packed import open_packed
from runner.checkpoint.publish import Publisher
from runner.checkpoint.save import SaveContext
from runner.checkpoint.state import Held
from runner.config.flags import parse_training
from runner.distributed.watchdog import StallTimer
from stores.base import read_in_blocks
from stores.folders.lock import locking
from stores.objects.client import ObjectWriter, ObstoreClient
from stores.objects.output import open_output
from tests.builders import (
    INDEX,
    edit_manifest,
    files_in,
    llama_config,
    pack,
    random_tensors,
    run,
    tensors_in,
    write_model,
)
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.reshard.delta import slime_decoder
from tests.fast.reshard.delta.states import weights_in
from tests.process.local_jobs import forked_runner
from tests.process.runner.checkpoint.save_worker import held_by
from tests.process.runner.training.test_frozen import FLAGS, train
from tests.process.runner.training_jobs import job, run_jobs
from tests.process.stores.objects.buckets import BUCKET, url_of
from tests.servers.s3 import MotoServer

pytestmark = pytest.mark.timeout(600)
RATE = ("--lr", "1e-3")


class CountingTimer(StallTimer):
    num_beats = 0

    def beat(self, stop: Event | None = None) -> None:
        self.num_beats += 1
        super().beat(stop)


def versions(chain: str | Path) -> list[tuple[int, int | None]]:
    assert reshard.verify_delta(chain).ok
    return [(entry.number, entry.base) for entry in reshard.delta_log(chain)]


def check_steps(chain: str | Path, checkpoints: Path, steps: dict[int, int], folder: Path) -> None:
    """Compare versions with the checkpoints of their steps: as they are exported, and as they are published."""
    states = {entry.number: entry.state for entry in reshard.delta_log(chain)}
    for number, step in steps.items():
        checkpoint = checkpoints / f"step-{step:06d}"
        run("export", checkpoint, "--to", "hf", "--dtype", "bf16", "--out", folder / f"hf{number}")
        run("export", f"{chain}@{number}", "--to", "hf", "--out", folder / f"version{number}")
        assert weights_in(folder / f"version{number}") == weights_in(folder / f"hf{number}")
        exported, version = (files_in(folder / f"{kind}{number}") for kind in ("hf", "version"))
        others = {name for name in exported if "safetensors" not in name}
        assert "config.json" in others
        assert {name: version.get(name) for name in others} == {name: exported[name] for name in others}
        published = reshard.publish_delta(checkpoint, folder / f"chain{number}", dtype="bf16")
        assert published.state == states[number]


@contextmanager
def publisher_to(chain: str | Path, folder: Path, timer: StallTimer) -> Iterator[tuple[Publisher, Held]]:
    """Yield a publisher of one rank, in this process, and its weights."""
    packed, timeout = open_packed(folder), timedelta(seconds=60)
    options = parse_training(["--data", "synthetic", "--publish", str(chain)]).publish
    assert options is not None
    context = SaveContext(manifest=packed.manifest, root=packed.root, parents=(packed.read.parent,))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=timeout)
    try:
        weights = held_by(0, packed)
        with Publisher(options, context, packed.shape, weights, timeout, timer) as publisher:
            yield publisher, weights
    finally:
        dist.destroy_process_group()


def publish_filled(publisher: Publisher, weights: Held, step: int) -> None:
    for piece in weights[0][WEIGHTS]:
        piece.memory.fill_(step)
    publisher.publish(weights, step)


def test_versions_are_the_weights_of_steps_that_change_bytes_and_slimes_decoder_gets_them(
    packed: Path, tmp_path: Path
) -> None:
    chain, checkpoints = tmp_path / "chain", tmp_path / "checkpoints"
    options = ("--publish", chain, "--publish-every", "1", "--steps", "3")
    saving = ("--checkpoint", checkpoints, "--checkpoint-every", "1")
    run_jobs(2, [
        job(packed, tmp_path / "still", *FLAGS, "--lr", "1e-12", *options),  # its steps change no byte of version 1
        job(packed, tmp_path / "log", *FLAGS, *RATE, *options, *saving),
    ])  # fmt: skip
    assert versions(chain) == [(1, None), (2, 1), (3, 2), (4, 3)]
    check_steps(chain, checkpoints, {2: 1, 3: 2, 4: 3}, tmp_path)
    run("export", packed, "--to", "hf", "--dtype", "bf16", "--out", tmp_path / "hf1")
    for number in (1, 2, 4):
        pulled = tmp_path / f"pulled{number}"
        slime_decoder.pull(pulled, tmp_path / "nothing", chain, number)
        assert weights_in(pulled) == weights_in(tmp_path / f"hf{number}")
    sizes = [
        sum(path.stat().st_size for path in (chain / f"weight_v{n:06d}").glob("*.safetensors")) for n in range(1, 5)
    ]
    for log, expected in (("still", sizes[:1]), ("log", sizes[1:])):
        lines = [json.loads(line) for line in (tmp_path / log / "metrics.jsonl").read_text().splitlines()]
        published = [line for line in lines if "published" in line]
        assert [line["publish_nbytes"] for line in published if line["publish_nbytes"]] == expected
        assert all(line["stall_s"] > 0 for line in published)


@pytest.mark.slow
@pytest.mark.slow
def test_parameters_that_transformers_has_in_float32_are_published_so(tmp_path: Path) -> None:
    save_tiny(tmp_path / "model", "Ernie4_5_MoeForCausalLM")
    packed, checkpoints = pack(tmp_path / "model", tmp_path / "packed", "pp=1"), tmp_path / "checkpoints"
    options = ("--publish", tmp_path / "chain", "--publish-every", "1", "--steps", "2")
    train(packed, tmp_path / "log", *RATE, *options, "--checkpoint", checkpoints, "--checkpoint-every", "1")
    check_steps(tmp_path / "chain", checkpoints, {1: 1, 2: 2}, tmp_path)
    assert {weight.dtype for weight in tensors_in(tmp_path / "version2").values()} == {"BF16", "F32"}


def test_restarts_go_on_in_the_chain_and_remove_nothing(packed: Path, tmp_path: Path) -> None:
    chain, checkpoints = tmp_path / "chain", tmp_path / "checkpoints"
    options = (*FLAGS, *RATE, "--publish", chain, "--publish-every", "1", "--publish-dtype", "float32",
               "--checkpoint", checkpoints, "--checkpoint-every", "1", "--resume", "auto")  # fmt: skip
    run_jobs(2, [job(packed, tmp_path / name, *options, "--steps", steps) for name, steps in (("a", 2), ("b", 3))])
    assert versions(chain) == [(1, None), (2, 1), (3, 2)]  # it starts with the weights of version 2
    shutil.rmtree(checkpoints / "step-000003")
    run_jobs(2, [job(packed, tmp_path / "c", *options, "--steps", 4)])
    # It starts from an earlier step: step 3 again has the weights of version 3, and is published as a full version.
    assert versions(chain) == [(1, None), (2, 1), (3, 2), (4, None), (5, 4)]
    done = reshard.apply_delta(chain, tmp_path / "served", version=3)
    done = reshard.apply_delta(chain, tmp_path / "served", version=4)
    assert (done.before, done.num_changed, done.write_nbytes) == (3, 0, 0)
    run("delta", "fold", chain)  # another process may publish, too
    assert run("delta", "publish", checkpoints / "step-000004", "--chain", chain, "--json").json["is_new"] is False


@pytest.mark.slow
def test_run_without_a_step_left_publishes_its_weights_unless_the_chain_has_them(packed: Path, tmp_path: Path) -> None:
    chain, checkpoints = tmp_path / "chain", tmp_path / "checkpoints"
    options = (*RATE, "--publish", chain, "--publish-every", "1", "--checkpoint", checkpoints, "--steps", "2")
    train(packed, tmp_path / "log", *options)
    ended = reshard.delta_log(chain)[-1].state
    shutil.rmtree(chain / "weight_v000002")  # as if the run had died before
    assert train(packed, tmp_path / "again", *options, "--resume", "auto") == []
    assert versions(chain) == [(1, None), (2, None)]
    assert reshard.delta_log(chain)[-1].state == ended
    run("delta", "fold", chain, "--version", "1")  # a roll back, which the run does not undo
    assert train(packed, tmp_path / "done", *options, "--resume", "auto") == []
    assert versions(chain) == [(1, None), (2, None), (3, None)]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--dp-shard", "2"), ("--tp", "2"), ("--dp-replicate", "2")])
def test_ranks_that_share_a_stage_publish_parts_of_it(packed: Path, tmp_path: Path, flags: tuple[str, ...]) -> None:
    chain, checkpoints, alone = tmp_path / "chain", tmp_path / "checkpoints", pack(packed, tmp_path / "alone", "pp=1")
    train(alone, tmp_path / "log", *RATE, *flags, "--steps", "2", "--publish", chain, "--publish-every", "1",
          "--checkpoint", checkpoints, "--checkpoint-every", "1", "--global-batch", "2", "--microbatch", "1",
          launch=("--nproc-per-node", "2"))  # fmt: skip
    assert versions(chain) == [(1, None), (2, 1)]
    check_steps(chain, checkpoints, {1: 1, 2: 2}, tmp_path)
    shards = sorted(path.stat().st_size for path in (chain / "weight_v000001").glob("*.safetensors"))
    if "--dp-replicate" in flags:
        assert len(shards) == 1
    else:  # each of both writes about half
        assert len(shards) == 2
        assert shards[1] < 2 * shards[0]


@pytest.mark.slow
def test_chain_in_a_bucket(packed: Path, tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch) -> None:
    chain, checkpoints = url_of("published"), tmp_path / "checkpoints"
    for name, value in moto.environment().items():
        monkeypatch.setenv(name, value)
    name = "model-00009-of-00009.safetensors"
    others = [open_output(f"{chain}/weight_v{number:06d}", wanted={name, INDEX}) for number in (1, 2)]
    for other in others:  # what killed publishers, or slower ones, have written is no file of a version
        other.put(name, b"half")
    train(packed, tmp_path / "log", *RATE, "--steps", "2", "--publish", chain, "--publish-every", "1",
          "--checkpoint", checkpoints, "--checkpoint-every", "1")  # fmt: skip
    assert versions(chain) == [(1, None), (2, 1)]
    check_steps(chain, checkpoints, {1: 1, 2: 2}, tmp_path)
    before = moto.objects(BUCKET, "published/")
    for other in others:
        with pytest.raises(InputError):
            other.commit(b"{}", INDEX)
        other.abort()
    assert moto.objects(BUCKET, "published/") == before
    assert not [key for key in before if name in key or ".reshard" in key]


def test_rank_has_one_shard_at_a_time_on_its_disk_before_it_is_in_the_bucket(
    packed_alone: Path, tmp_path: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr("runner.checkpoint.state.MAX_SHARD_NBYTES", 4096)
    writer, spooled = ObstoreClient.writer, dict[str, list[str]]()

    def write(client: ObstoreClient, name: str, *arguments: Any) -> ObjectWriter:
        spooled[f"{client.url}/{name}"] = [path.name for path in tmp_path.rglob("*.safetensors")]
        return writer(client, name, *arguments)

    monkeypatch.setattr(ObstoreClient, "writer", write)
    with publisher_to(url_of("sent"), packed_alone, StallTimer()) as (publisher, weights):
        for step in (1, 2):
            publish_filled(publisher, weights, step)
        assert [report.failure for report in publisher.reports(wait=True)] == [None, None]
    assert versions(url_of("sent")) == [(1, None), (2, 1)]
    shards = {url: names for url, names in spooled.items() if url.endswith(".safetensors")}
    assert len(shards) > 4
    assert {url: names for url, names in shards.items() if names != [Path(url).name]} == {}


def test_each_block_that_is_sent_to_a_bucket_is_progress(
    packed_alone: Path, moto: MotoServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("stores.base.read_in_blocks", partial(read_in_blocks, step=1024))
    timer, write, beats = CountingTimer(), ObjectWriter.write, list[int]()

    def counted(writer: ObjectWriter, *arguments: Any) -> None:
        beats.append(timer.num_beats)
        write(writer, *arguments)

    with publisher_to(url_of("slow"), packed_alone, timer) as (publisher, weights):
        monkeypatch.setattr(ObjectWriter, "write", counted)
        publish_filled(publisher, weights, 1)
        assert [report.failure for report in publisher.reports(wait=True)] == [None]
    assert len(beats) > 10
    assert all(after > before for before, after in pairwise(beats))


def test_config_of_a_version_does_not_tie_two_weights(tmp_path: Path) -> None:
    """vLLM goes by it, and would leave the head of the version behind."""
    config = llama_config(tie_word_embeddings=True)
    write_model(tmp_path / "model", config, random_tensors(llama_config()))
    packed = pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    with publisher_to(tmp_path / "chain", packed, StallTimer()) as (publisher, weights):
        publish_filled(publisher, weights, 1)
        assert [report.failure for report in publisher.reports(wait=True)] == [None]
    (published,) = (tmp_path / "chain").rglob("config.json")
    assert json.loads(published.read_text()) == {**config, "tie_word_embeddings": False}


def test_gitattributes_of_an_older_pack_are_not_published(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    packed = pack(tmp_path / "model", tmp_path / "packed", "pp=1")
    (packed / ".gitattributes").write_bytes(b"")
    entry = {"path": ".gitattributes", "nbytes": 0, "digest": digest_bytes(b"")}
    edit_manifest(packed, lambda document: document["files"].append(entry))
    with publisher_to(tmp_path / "chain", packed, StallTimer()) as (publisher, weights):
        publish_filled(publisher, weights, 1)
        assert [report.failure for report in publisher.reports(wait=True)] == [None]
    assert not list((tmp_path / "chain").rglob(".gitattributes"))
    assert versions(tmp_path / "chain") == [(1, None)]


def test_run_whose_lock_is_taken_over_publishes_nothing(
    packed_alone: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chain, commit = tmp_path / "chain", Publisher._commit

    def commit_late(publisher: Publisher, *arguments: Any) -> None:
        lock = chain / LOCK_NAME
        lock.write_text(json.dumps(json.loads(lock.read_text()) | {"nonce": "of another"}))
        commit(publisher, *arguments)

    with publisher_to(chain, packed_alone, StallTimer()) as (publisher, weights):
        monkeypatch.setattr(Publisher, "_commit", commit_late)
        publish_filled(publisher, weights, 1)
        failures = [report.failure for report in publisher.reports(wait=True)]
    assert [failure and failure.code for failure in failures] == ["launch.folder-in-use"]
    assert [path.name for path in chain.iterdir()] == [LOCK_NAME]


def test_version_that_a_kill_left_without_its_name_is_published_again(packed_alone: Path, tmp_path: Path) -> None:
    chain = tmp_path / "chain"
    with publisher_to(chain, packed_alone, StallTimer()) as (publisher, weights):
        for step in (1, 2):
            publish_filled(publisher, weights, step)
        publisher.reports(wait=True)
        (chain / "weight_v000002").rename(chain / ".weight_v000002.partial")  # killed right before the rename
        publish_filled(publisher, weights, 3)
        assert [report.failure for report in publisher.reports(wait=True)] == [None]
    assert versions(chain) == [(1, None), (2, None)]
    assert not list(chain.glob(".*.partial"))


def test_run_waits_for_another_process_that_publishes_to_its_chain(packed_alone: Path, tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "chain").mkdir()
    options = (*FLAGS, *RATE, "--steps", "1", "--publish", tmp_path / "chain")
    with ThreadPoolExecutor(1) as pool:
        with locking(tmp_path / "chain" / LOCK_NAME, "chain", "prunes it"):
            launched = pool.submit(forked_runner, "launch", packed_alone, "--log-dir", log, "--", *options)
            while not (log / "metrics.jsonl").exists() or "loss" not in (log / "metrics.jsonl").read_text():
                assert not launched.done(), launched.result().stderr
                time.sleep(0.05)
            time.sleep(1)
        assert launched.result().returncode == 0, launched.result().stderr
    assert versions(tmp_path / "chain") == [(1, None)]


@pytest.mark.slow
def test_run_that_may_not_write_a_version_to_a_bucket_says_so_and_continues(
    packed_alone: Path, tmp_path: Path, moto: MotoServer
) -> None:
    key = "refused/weight_v000001/of-another-program.bin"
    moto.client().put_object(Bucket=BUCKET, Key=key, Body=b"of nobody that we know")
    options = ("--steps", "2", "--publish", url_of("refused"), "--publish-every", "1")
    ended = forked_runner("launch", packed_alone, "--log-dir", tmp_path / "log", "--", *FLAGS, *RATE, *options)
    assert (ended.returncode, "[output.exists]" in ended.stderr) == (3, True), "of the last version"
    lines = [json.loads(line) for line in (tmp_path / "log/metrics.jsonl").read_text().splitlines()]
    failures = [line["publish_error"] for line in lines if "publish_error" in line]
    assert len(failures) == 2
    assert all("weight_v000001" in failure and "already exists" in failure for failure in failures)
    assert moto.objects(BUCKET, "refused/") == {key: b"of nobody that we know"}


def test_model_in_a_bucket_does_not_become_a_chain(packed: Path, tmp_path: Path, moto: MotoServer) -> None:
    run("export", packed, "--to", "hf", "--out", url_of("model"))
    before = moto.objects(BUCKET)
    with pytest.raises(OutputError) as error:
        reshard.publish_delta(packed, url_of("model"))
    assert (error.value.code, error.value.where) == ("output.not-ours", url_of("model"))
    alone = pack(packed, tmp_path / "alone", "pp=1")
    ended = forked_runner("launch", alone, "--log-dir", tmp_path / "log", "--", *FLAGS, "--publish", url_of("model"))
    assert ended.returncode == 3
    assert "[output.not-ours]" in ended.stderr
    assert moto.objects(BUCKET) == before


@pytest.mark.slow
@pytest.mark.parametrize("number", [1, 2, 3])
def test_kill_while_a_version_is_written_leaves_the_chain_whole(packed: Path, tmp_path: Path, number: int) -> None:
    chain = tmp_path / "chain"
    command = [sys.executable, "-m", "runner", "launch", packed, "--log-dir", tmp_path / "log", "--", *FLAGS, *RATE,
               "--steps", 9999, "--publish", chain, "--publish-every", 1, "--quiet"]  # fmt: skip
    with subprocess.Popen(list(map(str, command)), start_new_session=True, stderr=subprocess.PIPE) as process:
        name = f"weight_v{number:06d}"  # its partial folder is there for a moment only
        while not any((chain / each).exists() for each in (f".{name}.partial", name)) and process.poll() is None:
            time.sleep(0.001)
        assert process.poll() is None
        members = subprocess.run(["ps", "-ww", "-eo", "pid,args"], capture_output=True, text=True, check=True).stdout
        for line in members.splitlines():
            pid, _, words = line.strip().partition(" ")
            if str(tmp_path) in words:
                os.kill(int(pid), signal.SIGKILL)
        assert process.wait() == -signal.SIGKILL
    numbers = [at for at, _ in versions(chain)] if (chain / "weight_v000001").exists() else []
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= number - 1
    train(packed, tmp_path / "again", *RATE, "--steps", "1", "--publish", chain)
    assert versions(chain)[-1] == (len(numbers) + 1, None)
    assert not [path for path in chain.iterdir() if ".partial" in path.name]
