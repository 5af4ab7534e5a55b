"""What `runner launch` refuses at once, before torchrun starts and torch is imported."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow
import pytest
from click.testing import CliRunner
from pyarrow import parquet

from manifests.digest import digest_bytes
from manifests.errors import InputError, UsageError, UserError
from runner.checkpoint.history import checkpoint_path
from runner.commands import cli
from runner.config.flags import parse_training
from runner.preflight.preflight import check_documents, check_evaluable
from tests.builders import files_in, llama_config, pack, refusal, reshard, write_model
from tests.fast.manifests.models.catalogued import save_tiny
from tests.fast.reshard.forged import change_file, change_manifest
from tests.fast.trained import write_trained

Words = tuple[str, ...]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("refused")
    write_trained(place, "pp=2")
    write_trained(place / "other", "pp=2", intermediate_size=32)
    for name in ("pp2", "quantized"):
        pack(place / "source", place / name)
    quantize(place / "quantized")
    (place / "text").mkdir()
    (place / "text" / "one.txt").write_text("one two three")
    (place / "link").symlink_to(place)
    for name, data in (("empty.txt", b""), ("empty.jsonl", b"\n \n"), ("latin.txt", b"caf\xe9 \n")):
        (place / name).write_bytes(data)
    return place


def quantize(packed: Path) -> None:
    """Let a config say that its weights are quantized."""
    config = json.loads((packed / "config.json").read_bytes())
    change_file(packed, "config.json", json.dumps({**config, "quantization_config": {"quant_method": "fp8"}}).encode())


REFUSED: list[tuple[str, Words, Words, str, str]] = [
    ("quantized", (), (), "model.quantized", "PLACE/quantized/config.json: quantization_config"),
    ("trained", (), (), "resume.undecided", "PLACE/trained/manifest.json"),
    ("trained", ("--scheduler", "slurm"), (), "resume.undecided", "PLACE/trained/manifest.json"),
    ("pp2", ("--scheduler", "slurm"), ("--resume", "auto"), "resume.nothing-to-find", "--resume auto"),
    ("trained", (), ("--resume", "PLACE/gone"), "resume.no-checkpoint", "--resume PLACE/gone"),
    ("pp2", (), ("--resume", "auto", "--checkpoint", "PLACE/none", "--microbatch", "3"),
     "options.batch-size", "--global-batch"),
    ("trained", (), ("--resume", "PLACE/other/trained"), "resume.other-model", "PLACE/other/trained/manifest.json"),
    ("trained", (), ("--resume", "PLACE/pp2"), "resume.no-optimizer-state", "PLACE/pp2/manifest.json"),
    ("trained", (), ("--resume", "PLACE/trained", "--schedule", "ZBVZeroBubble"), "schedule.other-placement",
     "--schedule"),
    ("pp2", ("--nproc-per-node", "8"), ("--tp", "4"), "options.tp-divisor", "--tp"),
    ("pp2", ("--nproc-per-node", "6"), (), "options.batch-size", "--global-batch"),
    ("pp2", (), ("--data", "PLACE/gone"), "data.no-files", "PLACE/gone"),
    ("pp2", (), ("--eval-data", "PLACE/gone"), "data.no-files", "PLACE/gone"),
    *(("pp2", (), ("--data", "PLACE/text", flag, "PLACE/gone", *more), "data.no-files", "PLACE/gone")
      for flag, more in (
          ("--data", ("--data-weight", "1", "--data-weight", "0")), ("--eval-data", ("--skip-bad-documents",)),
      )),
    *(("pp2", (), (flag, f"PLACE/empty.{suffix}"), "data.empty", f"{flag} PLACE/empty.{suffix}")
      for flag in ("--data", "--eval-data") for suffix in ("txt", "jsonl")),
    ("pp2", (), ("--eval-data", "PLACE/text", "--resume", "auto", "--checkpoint", "c", "--data", "PLACE/latin.txt"),
     "data.not-utf8", "PLACE/latin.txt:1"),
    ("pp2", (), ("--eval-data", "PLACE/latin.txt"), "data.not-utf8", "PLACE/latin.txt:1"),
    ("pp2", (), ("--eval-data", "synthetic"), "options.needs-documents", "--eval-data"),
    ("pp2", (), ("--save", "PLACE/trained"), "output.exists", "PLACE/trained"),
    ("pp2", (), ("--save", "PLACE/source", "--force"), "output.not-ours", "PLACE/source"),
]  # fmt: skip

TOO_SMALL: list[tuple[Words, str, str]] = [  # a machine without GPUs
    (("--device", "cuda"), "launch.too-few-gpus", "--device cuda"),
    (("--device", "cpu", "--seq-len", "1000000000"), "launch.host-memory", "--device cpu"),
    (("--device", "auto", "--seq-len", "1000000000"), "launch.host-memory", "--device cpu"),
]

TAKEN: list[tuple[Words, str]] = [
    (("--save", "PLACE/pp2"), "the launched PLACE/pp2"),
    (("--save", "PLACE"), "the launched PLACE/pp2"),
    (("--save", "PLACE/out", "--checkpoint", "PLACE/out"), "--checkpoint PLACE/out"),
    (("--save", "PLACE/out/../out", "--checkpoint", "PLACE/out/ck"), "--checkpoint PLACE/out/ck"),
    (("--save", "PLACE/link/out", "--log-dir", "PLACE/out/log"), "--log-dir PLACE/out/log"),
    (("--save", "PLACE/other/trained", "--resume", "PLACE/other/trained/manifest.json"),
     "--resume PLACE/other/trained/manifest.json"),
    (("--save", "PLACE/text", "--data", "PLACE/te*/*.txt"), "--data PLACE/te*/*.txt"),
    (("--save", "PLACE/text", "--eval-data", "PLACE/text/one.txt"), "--eval-data PLACE/text/one.txt"),
]  # fmt: skip


@pytest.mark.parametrize(("packed", "flags", "training", "code", "where"), REFUSED)
def test_request_that_cannot_begin_is_refused(
    packed: str, flags: Words, training: Words, code: str, where: str, place: Path
) -> None:
    data = () if "--data" in training else ("--data", "synthetic")
    words = ["launch", f"PLACE/{packed}", *flags, "--dry-run", "--", *data, *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert isinstance(done.exception, UserError), done.output
    assert (done.exception.code, done.exception.where.replace(str(place), "PLACE")) == (code, where)


@pytest.mark.parametrize(("training", "code", "where"), TOO_SMALL)
def test_request_that_this_machine_cannot_train_is_refused_unless_it_is_a_dry_run(
    training: Words, code: str, where: str, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[bool] = []
    monkeypatch.setattr("runner.launch.command.launch_here", lambda *_, dry_run, **__: started.append(dry_run))
    monkeypatch.setattr("runner.preflight.preflight.version", lambda _: "2.13.0+cpu")
    words = ["--", "--data", "synthetic", "--log-dir", str(place / "log"), *training]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), *words])
    assert isinstance(done.exception, UserError), done.output
    assert (done.exception.code, done.exception.where) == (code, where)
    assert CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", *words]).exception is None
    assert started == [True]


def test_resumed_run_is_not_refused_for_memory_as_its_checkpoint_may_recall_dtypes_that_need_less(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Path] = []
    monkeypatch.setattr("runner.launch.command.launch_here", lambda *_, run, **__: started.append(run.path))
    monkeypatch.setattr("runner.launch.command.check_host_memory", lambda *_: pytest.fail("the dtypes are not known"))
    words = ["--data", "synthetic", "--device", "cpu", "--log-dir", str(place / "log"), "--restart-data", "--resume"]
    done = CliRunner().invoke(cli, ["launch", str(place / "trained"), "--", *words, str(place / "trained")])
    assert done.exception is None, done.exception
    assert started == [place / "log"]


@pytest.mark.parametrize(("training", "taken"), TAKEN)
def test_save_that_would_take_something_of_the_run_away_is_refused(training: Words, taken: str, place: Path) -> None:
    data = () if "--data" in training else ("--data", "synthetic")
    words = ["launch", "PLACE/pp2", "--dry-run", "--", *data, "--force", *training]
    done = CliRunner().invoke(cli, [word.replace("PLACE", str(place)) for word in words])
    assert isinstance(done.exception, UsageError), done.output
    where, problem = (text.replace(str(place), "PLACE") for text in (done.exception.where, done.exception.problem))
    assert (done.exception.code, where) == ("output.inside-input", f"--save {training[1]}")
    assert problem.endswith(taken)


@pytest.mark.parametrize("flag", ["--save", "--checkpoint"])
@pytest.mark.parametrize("inside", ["pp2/trained", "pp2/../pp2/a/b", "linked/a"])
def test_run_that_would_save_inside_its_bundles_is_refused(flag: str, inside: str, place: Path) -> None:
    if not (place / "linked").exists():
        (place / "linked").symlink_to("pp2")
    training = ["--data", "synthetic", flag, str(place / inside)]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", "--", *training])
    assert isinstance(done.exception, UsageError), done.output
    assert (done.exception.code, done.exception.where) == ("output.inside-input", f"{flag} {place}/{inside}")


def test_run_whose_checkpoints_lie_inside_its_bundles_goes_on(place: Path, tmp_path: Path) -> None:
    packed = shutil.copytree(place / "pp2", tmp_path / "pp2")
    history = packed / "ck"
    shutil.copytree(place / "trained", checkpoint_path(history, 60))
    words = ["launch", str(packed), "--dry-run", "--", "--data", "synthetic", "--checkpoint", str(history)]
    done = CliRunner().invoke(cli, [*words, "--resume", "auto"])
    assert done.exception is None, done.exception
    inside = CliRunner().invoke(cli, [*words, "--save", f"{history}/final"]).exception
    assert isinstance(inside, UsageError)
    assert (inside.code, inside.where) == ("output.inside-input", f"--save {history}/final")


def test_force_does_not_replace_a_checkpoint_of_another_run(place: Path, tmp_path: Path) -> None:
    step, log = shutil.copytree(place / "trained", checkpoint_path(tmp_path / "other", 60)), tmp_path / "log"
    change_manifest(step, lambda document: document.update(created_by="runner 1"))
    before = files_in(step)
    training = ["--data", "synthetic", "--log-dir", str(log), "--save", str(step), "--force"]
    error = CliRunner().invoke(cli, ["launch", f"{place}/pp2", "--", *training]).exception
    assert isinstance(error, UserError)
    assert (error.code, error.where) == ("output.is-a-step", str(step))
    packed = reshard("pack", place / "source", "--layout", "pp=2", "--out", step, "--force")
    assert (packed.code, "[output.is-a-step]" in packed.err) == (3, True)
    in_place = ("pack", step, "--layout", "pp=1", "--out", step, "--force")
    for divided in (("--part", "1/1"), ("--parts", "1", "--scheduler", "slurm", "--dry-run")):
        assert refusal(*in_place, *divided).found == (3, "output.is-a-step", str(step))
    assert files_in(step) == before
    pack(step, step, "pp=1", "--force")


@pytest.mark.parametrize("model", ["source", "trained"])
def test_folder_of_a_model_does_not_become_a_chain(model: str, place: Path) -> None:
    before = files_in(place / model)
    training = ["--data", "synthetic", "--publish", f"{place}/{model}"]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", "--", *training])
    assert isinstance(done.exception, UserError), done.output
    assert (done.exception.code, done.exception.where) == ("output.not-ours", f"--publish {place}/{model}")
    assert files_in(place / model) == before


def test_save_under_the_name_of_a_checkpoint_is_refused(place: Path) -> None:
    training = ["--data", "synthetic", "--checkpoint", f"{place}/ck", "--save", f"{place}/ck/step-000010"]
    done = CliRunner().invoke(cli, ["launch", str(place / "pp2"), "--dry-run", "--", *training])
    assert isinstance(done.exception, UsageError)
    assert (done.exception.code, done.exception.where) == ("output.inside-input", f"--save {place}/ck/step-000010")


def test_manifest_in_a_snapshot_of_the_hubs_cache_begins(place: Path) -> None:
    cache = place / "hub" / "models--org--pp2"
    snapshot = cache / "snapshots" / "abc"
    (cache / "blobs").mkdir(parents=True)
    for file in (path for path in (place / "pp2").rglob("*") if path.is_file()):
        blob, link = cache / "blobs" / digest_bytes(file.read_bytes()), snapshot / file.relative_to(place / "pp2")
        shutil.copy(file, blob)
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(os.path.relpath(blob, link.parent))
    for manifest in (snapshot, snapshot / "manifest.json"):
        done = CliRunner().invoke(cli, ["launch", str(manifest), "--dry-run", "--", "--data", "synthetic"])
        assert done.exception is None, done.exception
        assert f"runner.train {snapshot}/manifest.json " in done.stdout


@pytest.mark.parametrize("verb", ["launch", "eval"])
@pytest.mark.parametrize(
    ("changes", "where", "code"),
    [
        ({"pretraining_tp": 2}, "pretraining_tp", "config.unsupported-value"),
        ({"is_causal": False}, "is_causal", "config.unsupported-value"),
    ],
)
def test_config_that_no_family_models_is_refused_before_ranks_are_started_or_submitted(
    changes: dict[str, Any], where: str, code: str, verb: str, tmp_path: Path
) -> None:
    write_model(tmp_path / "source", llama_config(**changes))
    pack(tmp_path / "source", tmp_path / "packed")
    (tmp_path / "a.txt").write_text("a")
    words = {
        "launch": ["--scheduler", "slurm", "--dry-run", "--", "--data", "synthetic"],
        "eval": ["--dry-run", "--data", str(tmp_path / "a.txt")],
    }[verb]
    done = CliRunner().invoke(cli, [verb, str(tmp_path / "packed"), *words])
    assert isinstance(done.exception, InputError), done.output
    assert (done.exception.where, done.exception.code) == (f"config.json: {where}", code)


@pytest.mark.parametrize(
    ("architecture", "changes", "where", "code"),
    [
        (
            "BambaForCausalLM",
            {"z_loss_coefficient": 0.1},
            "config.json: z_loss_coefficient",
            "config.unsupported-field",
        ),
        ("Gemma3ForConditionalGeneration", {}, "config.json", "config.towers"),
    ],
)
def test_what_the_catalogue_says_is_not_trained_is_refused_before_ranks_are_started(
    architecture: str, changes: dict[str, Any], where: str, code: str, tmp_path: Path
) -> None:
    save_tiny(tmp_path / "source", architecture, **changes)
    pack(tmp_path / "source", tmp_path / "packed", "pp=1")
    done = CliRunner().invoke(cli, ["launch", str(tmp_path / "packed"), "--dry-run", "--", "--data", "synthetic"])
    assert isinstance(done.exception, InputError), done.output
    assert (done.exception.where, done.exception.code) == (where, code)


def test_rows_of_several_documents_are_checked_with_the_mask_that_keeps_them_apart(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"input_ids": [1, 2, 3, 4], "document_ids": [0, 0, 1, 1]}\n')
    words = ["--data", str(tmp_path / "rows.jsonl"), "--tokenized"]
    check_documents("--data", parse_training([*words, "--document-mask"]).data)
    with pytest.raises(UserError) as caught:
        check_documents("--data", parse_training(words).data)
    assert caught.value.code == "data.bad-row"


@pytest.mark.parametrize("suffix", ["jsonl", "parquet"])
def test_rows_are_checked_with_the_fields_that_the_loss_reads(suffix: str, place: Path, tmp_path: Path) -> None:
    """`completion_mask` alone is refused where the loss does not read it."""
    file = tmp_path / f"rows.{suffix}"
    record = {"input_ids": [1, 2, 3], "completion_mask": [0, 1, 1]}
    if suffix == "jsonl":
        file.write_text(json.dumps(record))
    else:
        parquet.write_table(pyarrow.Table.from_pylist([record]), file)

    def code(*words: str) -> str | None:
        launch = ["launch", str(place / "pp2"), "--dry-run", "--", "--tokenized"]
        error = CliRunner().invoke(cli, [*launch, *words]).exception
        assert error is None or isinstance(error, UserError)
        return error.code if error else None

    data, weights = ("--data", str(file)), ("--token-weights", "completion_mask")
    assert [code(*data, *flags) for flags in ((), weights, ("--token-weights", "w"))] == [
        "data.bad-row", None, "data.bad-row",
    ]  # fmt: skip
    assert code(*data, *weights, "--eval-data", str(file)) == "data.bad-row"  # which reports plain cross-entropy
    options = parse_training([*data, "--tokenized", "--loss", "mine", "--eval-data", str(file)])
    assert options.eval_data is not None
    check_documents("--data", options.data, options.loss)
    check_evaluable(options.eval_data, options.loss)


def test_agent_for_which_no_temporary_folder_can_be_made_says_so() -> None:
    code = "import tempfile\ntempfile._candidate_tempdir_list = lambda: ['/proc/none']\n"
    code += "from runner.launch.agent.agent import main\nmain()\n"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert ended.returncode == InputError.exit_code
    assert re.fullmatch(r"error: TMPDIR: .+ \[output\.unwritable\]\nhint: .+\n", ended.stderr), ended.stderr
