"""Training on virtual bundles: real ranks read the original files, each its own, as they would read copies."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fast.runner.tiny import EMBEDDING, HEAD, save_model
from tests.servers.s3 import start_moto

pytestmark = pytest.mark.process

ROOT = Path(__file__).resolve().parents[2]
INDEX = "model.safetensors.index.json"
TRAINING = (
    "--data", "synthetic", "--seq-len", "16", "--global-batch", "8", "--microbatch", "2", "--steps", "3", "--lr", "1e-3"
)  # fmt: skip


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny tied Llama in a dozen files."""
    folder = tmp_path_factory.mktemp("models") / "tied"
    save_model(folder.with_name("whole"), tie_word_embeddings=True).save_pretrained(folder, max_shard_size="150KB")
    return folder


def run(module: str, *arguments: str | Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", module, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=100,
    )


def pack(source: str | Path, out: Path, *flags: str, **environment: str) -> Path:
    done = run("reshard", "pack", source, "--layout", "pp=2", "--out", out, *flags, **environment)
    assert done.returncode == 0, done.stderr
    return out


@pytest.fixture(scope="module")
def trained(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Training on copies and on virtual bundles of one source: what was packed, logged, opened and saved."""
    out = tmp_path_factory.mktemp("trained")
    opened = os.pathsep.join((str(ROOT / "tests/process/opened"), str(ROOT)))
    for name, flags in (("copies", ()), ("virtual", ("--virtual",))):
        packed = pack(source, out / name / "packed", *flags)
        done = run(
            "runner.cli", "launch", packed, "--", *TRAINING, "--save", out / name / "saved", "--log-dir", out / name,
            OPENED_LOG=str(out / name / "opened"), PYTHONPATH=opened,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    return out


def losses(log_dir: Path) -> list[float]:
    lines = [json.loads(line) for line in (log_dir / "metrics.jsonl").read_text().splitlines()]
    return [line["loss"] for line in lines if "loss" in line]


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


def test_training_on_virtual_bundles_gives_the_losses_of_copies(trained: Path) -> None:
    assert not list((trained / "virtual" / "packed").rglob("*.safetensors"))
    assert len(losses(trained / "virtual")) == 3
    assert losses(trained / "virtual") == losses(trained / "copies")


@pytest.mark.parametrize("rank", [0, 1])
def test_each_rank_opens_only_the_files_of_its_spans(rank: int, source: Path, trained: Path) -> None:
    opened = set((trained / "virtual" / f"opened.{rank}").read_text().split())
    assert {path for path in opened if path.startswith(str(source))} == files_of_rank(source, rank)
    assert len(files_of_rank(source, rank)) < len(list(source.glob("*.safetensors"))) - 2


def test_weights_trained_on_virtual_bundles_are_saved_as_copies(trained: Path) -> None:
    shards = [sorted((trained / name / "saved").rglob("*.safetensors")) for name in ("copies", "virtual")]
    assert len(shards[0]) == len(shards[1]) >= 2
    for copied, virtual in zip(*shards, strict=True):
        assert copied.read_bytes() == virtual.read_bytes()
    verified = run("reshard", "verify", trained / "virtual" / "saved")
    assert (verified.returncode, verified.stderr) == (0, "")
    assert verified.stdout.endswith(": all digests match the manifest\n")


@pytest.mark.slow
def test_training_on_originals_in_a_bucket_gives_the_losses_of_copies(
    source: Path, trained: Path, tmp_path: Path
) -> None:
    with start_moto(tmp_path) as server:
        server.bucket("models")
        for path in source.iterdir():
            server.client().put_object(Bucket="models", Key=f"tied/{path.name}", Body=path.read_bytes())
        environment = {"AWS_CONFIG_FILE": "/nowhere", "AWS_SHARED_CREDENTIALS_FILE": "/nowhere", **server.environment()}
        packed = pack("s3://models/tied", tmp_path / "virtual", "--virtual", **environment)
        before = len(server.requests("GET", "models/tied/"))
        done = run("runner.cli", "launch", packed, "--", *TRAINING, "--log-dir", tmp_path, **environment)
        assert done.returncode == 0, done.stderr
        sent = server.requests("GET", "models/tied/")[before:]
    assert losses(tmp_path) == losses(trained / "copies")
    files = [file for rank in (0, 1) for file in files_of_rank(source, rank)]
    heads = sum(min(os.path.getsize(file), 128 << 10) for file in files)  # read with the header
    assert sum(request.sent_nbytes for request in sent) <= heads + sum(os.path.getsize(file) for file in files)


def test_changed_original_ends_all_ranks_with_one_message_that_names_it(source: Path, tmp_path: Path) -> None:
    packed = pack(source, tmp_path / "virtual", "--virtual")
    changed = max(files_of_rank(source, 1) - files_of_rank(source, 0))
    os.utime(changed)
    done = run("runner.cli", "launch", packed, "--", *TRAINING, "--log-dir", tmp_path)
    assert (done.returncode, done.stdout) == (3, "")
    (message,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert message.startswith(f"error: rank 1, stage 1, node {socket.gethostname()}: {changed}: expected ")
    assert "Traceback" not in done.stderr
