"""Training on virtual bundles: real ranks read the original files, each its own, as they would read copies."""

from __future__ import annotations

import json
import os
import re
import shutil
from pathlib import Path

import pytest

from stores.open import open_manifest
from tests.builders import INDEX, pack, reshard
from tests.fast.runner.tiny import EMBEDDING, HEAD, save_model
from tests.process.local_jobs import runner
from tests.process.runner.training_jobs import job, losses_of, run_jobs, said
from tests.process.stores.objects.buckets import become
from tests.servers.s3 import start_moto

TRAINING = (
    "--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--microbatch", "2", "--steps", "3",
    "--lr", "1e-3", "--no-self-check",
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama in a dozen files."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    save_model(folder.with_name("whole"), tie_word_embeddings=True).save_pretrained(folder, max_shard_size="150KB")
    return folder


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training on copies and on virtual bundles of one source, and on a source that changed since it was packed."""
    out, jobs = tmp_path_factory.mktemp("trained"), []
    for name, flags in (("copies", ()), ("virtual", ("--virtual",))):
        packed, opened = pack(source, out / name / "packed", "pp=2", *flags), out / name / "opened"
        jobs.append(job(packed, out / name, *TRAINING, "--save", out / name / "saved", opened=opened))
    changed = shutil.copytree(source, out / "changed" / "source")
    packed = pack(changed, out / "changed" / "packed", "pp=2", "--virtual")
    os.utime(file_of_rank_1_alone(changed))
    run_jobs(2, [job(packed, out / "changed", *TRAINING), *jobs])
    return out


def opened_by(rank: int, log_dir: Path) -> set[str]:
    return {path for path in (log_dir / f"opened.{rank}").read_text().split() if "saved" not in path}


def files_of_rank(source: Path, rank: int) -> set[str]:
    """Return the files that hold what one of two ranks needs of eight layers, as the index says."""
    weight_map: dict[str, str] = json.loads((source / INDEX).read_text())["weight_map"]
    assert HEAD not in weight_map
    mine = {EMBEDDING} if rank == 0 else {EMBEDDING, "model.norm.weight"}  # the head's bytes are the embedding's
    for fqn in weight_map:
        layer = re.match(r"model\.layers\.(\d)\.", fqn)
        if layer and int(layer[1]) // 4 == rank:
            mine.add(fqn)
    return {str(source / weight_map[fqn]) for fqn in mine}


def file_of_rank_1_alone(source: Path) -> str:
    return max(files_of_rank(source, 1) - files_of_rank(source, 0))


def test_training_on_virtual_bundles_gives_the_losses_of_copies(trained: Path) -> None:
    assert not list((trained / "virtual" / "packed").rglob("*.safetensors"))
    assert len(losses_of(trained / "virtual")) == 3
    assert losses_of(trained / "virtual") == losses_of(trained / "copies")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_opens_its_own_stages_shards_and_no_other(rank: int, trained: Path) -> None:
    packed = trained / "copies" / "packed"
    shards = {str(packed / shard.path) for shard in open_manifest(packed).manifest.stages[rank].shards}
    assert opened_by(rank, trained / "copies") == shards
    assert shards >= {str(packed / f"model-0000{rank + 1}-of-00002.safetensors")}


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_opens_only_the_files_of_its_spans(rank: int, source: Path, trained: Path) -> None:
    assert opened_by(rank, trained / "virtual") == files_of_rank(source, rank)
    assert len(files_of_rank(source, rank)) < len(list(source.glob("*.safetensors"))) - 2


def test_weights_trained_on_virtual_bundles_are_saved_as_copies(trained: Path) -> None:
    shards = [sorted((trained / name / "saved").rglob("*.safetensors")) for name in ("copies", "virtual")]
    assert len(shards[0]) == len(shards[1]) >= 2
    for copied, virtual in zip(*shards, strict=True):
        assert copied.read_bytes() == virtual.read_bytes()
    verified = reshard("verify", trained / "virtual" / "saved")
    assert (verified.code, verified.err) == (0, "")
    assert verified.out.endswith(": all digests match the manifest\n")


@pytest.mark.slow
def test_training_on_originals_in_a_bucket_gives_the_losses_of_copies(
    source: Path, trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with start_moto(tmp_path) as server:
        server.bucket("models")
        for path in source.iterdir():
            server.client().put_object(Bucket="models", Key=f"tied/{path.name}", Body=path.read_bytes())
        environment = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", **server.environment()}
        become(monkeypatch, environment)
        packed = pack("s3://models/tied", tmp_path / "virtual", "pp=2", "--virtual")
        before = len(server.requests("GET", "models/tied/"))
        done = runner("launch", packed, "--", *TRAINING, "--log-dir", tmp_path)
        assert done.returncode == 0, done.stderr
        sent = server.requests("GET", "models/tied/")[before:]
    assert losses_of(tmp_path) == losses_of(trained / "copies")
    files = [file for rank in (0, 1) for file in files_of_rank(source, rank)]
    heads = sum(min(os.path.getsize(file), 128 << 10) for file in files)  # read with the header
    assert sum(request.sent_nbytes for request in sent) <= heads + sum(os.path.getsize(file) for file in files)


def test_changed_original_ends_all_ranks_with_one_message_that_names_it(trained: Path) -> None:
    changed = file_of_rank_1_alone(trained / "changed" / "source")
    (message,) = (line for line in said(trained / "changed").splitlines() if line.startswith("error: "))
    assert message == f"error: source.changed at rank 1: {changed}"
