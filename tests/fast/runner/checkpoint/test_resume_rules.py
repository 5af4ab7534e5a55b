"""What a run may resume from, the options it recalls, and how everything else is refused."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import save_file

from manifests.digest import digest_bytes
from manifests.errors import InputError, UsageError
from manifests.schedules.learning_rate import rate_at
from manifests.schema import DataPosition, LearningRate, OptimizerState, ParameterGroup, TrainingState
from manifests.trained import STEPS_NAME, TRAINED_NAME, encode_steps, encode_trained
from runner.bundle.packed import Packed, open_packed
from runner.checkpoint.history import checkpoint_path
from runner.checkpoint.resume import (
    Origin,
    check_fits,
    check_state_of_all,
    differing_steps,
    find_origins,
    override_notes,
    remember,
    remembered,
    resumed_state,
    schedule_notes,
)
from runner.config.flags import TrainOptions, parse_training, recall
from tests.builders import EMBEDDING, HEAD, pack, run
from tests.fast.reshard.forged import change_file, change_manifest
from tests.fast.trained import STATE, write_trained
from tests.process.runner.pipeline.mtp_oracle import config_of, random_weights

Wording = Callable[[str], None]
GROUP = STATE["optimizer"]["groups"][0]


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that nobody trained, beside `trained`, the same with moments after step 60."""
    trained = write_trained(tmp_path_factory.mktemp("rules"), "pp=2", num_hidden_layers=1)
    return pack(trained.with_name("source"), trained.with_name("packed"), "pp=1")


@pytest.fixture
def trained(packed: Path, tmp_path: Path) -> Path:
    shutil.copytree(packed.with_name("trained"), tmp_path / "trained")
    return tmp_path / "trained"


def options(*args: object) -> TrainOptions:
    return parse_training(["--data", "synthetic", *map(str, args)])


def history_of(trained: Path, *steps: int) -> Path:
    history = trained.parent / "history"
    for step in steps:
        shutil.copytree(trained, checkpoint_path(history, step))
        change_manifest(
            checkpoint_path(history, step), lambda document, step=step: document["training"].update(step=step)
        )
    return history


def origins(launched: Path, asked: TrainOptions) -> tuple[Path, ...]:
    return tuple(origin.folder for origin in find_origins(Origin(launched), asked))


def state_of(trained: Path) -> TrainingState:
    state = open_packed(trained).manifest.training
    assert state is not None
    return state


def test_auto_is_the_newest_then_the_ones_before_then_what_is_launched(packed: Path, trained: Path) -> None:
    history = trained.parent / "history"
    auto = options("--resume", "auto", "--checkpoint", history)
    assert origins(packed, auto) == (packed,)
    history_of(trained, 5, 40, 10)
    assert origins(packed, auto) == tuple(checkpoint_path(history, step) for step in (40, 10, 5))


def test_copy_under_the_name_of_a_later_step_is_not_resumed(packed: Path, trained: Path, wording: Wording) -> None:
    history = history_of(trained, 2, 4)
    shutil.copytree(checkpoint_path(history, 2), checkpoint_path(history, 10))
    auto = options("--resume", "auto", "--checkpoint", history)
    assert origins(packed, auto) == tuple(checkpoint_path(history, step) for step in (4, 2))
    with pytest.raises(InputError) as error:
        origins(packed, options("--resume", "step-10", "--checkpoint", history))
    assert (error.value.code, error.value.where) == ("resume.other-step", "--resume step-10")
    wording(str(error.value).replace(str(history), "HISTORY"))


def test_auto_that_never_finds_anything_is_refused(packed: Path, trained: Path, wording: Wording) -> None:
    with pytest.raises(UsageError) as error:
        origins(packed, options("--resume", "auto"))
    assert (error.value.code, error.value.where) == ("resume.nothing-to-find", "--resume auto")
    wording(str(error.value).replace(str(packed), "PACKED"))
    assert origins(trained, options("--resume", "auto")) == (trained,)


@pytest.mark.parametrize(
    ("args", "code", "where"),
    [
        ((), "checkpoint.folder-in-use", "HISTORY"),
        (("--resume", "step-10"), "checkpoint.folder-in-use", "HISTORY"),
        (("--resume", "step-40", "--resume-weights-only"), "checkpoint.folder-in-use", "HISTORY"),
        (("--resume", "step-30"), "resume.no-checkpoint", "--resume step-30"),
        (("--resume", "nowhere"), "resume.no-checkpoint", "--resume nowhere"),
        (("--resume", "latest"), "resume.no-checkpoint", "--resume latest"),
    ],
)
def test_checkpoints_of_another_past_are_refused(
    args: tuple[str, ...], code: str, where: str, packed: Path, trained: Path, wording: Wording
) -> None:
    history = history_of(trained, 10, 40)
    with pytest.raises(InputError) as error:
        origins(packed, options(*args, "--checkpoint", history))
    assert (error.value.code, error.value.where.replace(str(history), "HISTORY")) == (code, where)
    if len(args) < 3:
        wording(str(error.value))


def test_step_with_a_slash_is_a_folder_here_or_one_of_the_checkpoints(
    packed: Path, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    history = history_of(trained, 40)
    asked = options("--resume", "step-000040/", "--checkpoint", history)
    assert origins(packed, asked) == (checkpoint_path(history, 40),)
    here = trained.parent / "here" / "step-000040"
    shutil.copytree(checkpoint_path(history, 40), here)
    monkeypatch.chdir(here.parent)
    assert origins(packed, asked) == (here,)


def test_checkpoints_that_the_named_one_does_not_descend_from_are_refused(
    packed: Path, trained: Path, wording: Wording
) -> None:
    history = history_of(trained, 30)
    with pytest.raises(InputError) as error:
        origins(packed, options("--resume", trained, "--checkpoint", history, "--keep", 1))
    assert (error.value.code, error.value.where) == ("checkpoint.folder-in-use", str(history))
    wording(str(error.value))


def test_copy_of_the_newest_and_what_was_made_out_of_it_may_be_named(trained: Path, tmp_path: Path) -> None:
    history, cut = history_of(trained, 30, 60), tmp_path / "cut"
    copied = shutil.copytree(checkpoint_path(history, 60), tmp_path / "copied")
    assert origins(trained, options("--resume", copied, "--checkpoint", history)) == (copied,)
    pack(checkpoint_path(history, 60), cut, "pp=1")
    assert origins(cut, options("--resume", cut, "--checkpoint", history)) == (cut,)


@pytest.mark.parametrize(
    ("args", "where", "code"),
    [
        (("--resume", "step-40"), "--resume step-40", "options.needs-checkpoint"),
        (("--resume", "auto", "--resume-weights-only"), "--resume-weights-only", "options.auto-weights-only"),
        (("--checkpoint-every", "5"), "--checkpoint-every", "options.needs-checkpoint"),
        (("--keep", "5"), "--keep", "options.needs-checkpoint"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(args: tuple[str, ...], where: str, code: str) -> None:
    with pytest.raises(UsageError) as error:
        options(*args)
    assert (error.value.where, error.value.code) == (where, code)


def test_state_counts_when_it_is_resumed_and_weights_alone_when_asked(packed: Path, trained: Path) -> None:
    origin, fresh = open_packed(trained), open_packed(packed)
    resumed = options("--resume", trained).resume
    assert resumed_state(origin, resumed, is_launched=False) == state_of(trained)
    assert resumed_state(origin, options("--resume", "auto").resume, is_launched=True) == state_of(trained)
    assert resumed_state(fresh, options("--resume", "auto").resume, is_launched=True) is None
    assert resumed_state(fresh, options().resume, is_launched=True) is None
    with pytest.raises(InputError) as none:
        resumed_state(fresh, options("--resume", packed).resume, is_launched=True)
    assert (none.value.code, none.value.where) == ("resume.no-optimizer-state", fresh.where)
    with pytest.raises(UsageError) as error:
        resumed_state(fresh, options("--resume-weights-only").resume, is_launched=True)
    assert (error.value.where, error.value.code) == ("--resume-weights-only", "options.needs-resume")
    for args in (("--resume-weights-only",), ("--resume", trained, "--resume-weights-only")):
        assert resumed_state(origin, options(*args).resume, is_launched=True) is None


def test_checkpoint_in_a_store_is_resumed_as_a_copy(trained: Path, tmp_path: Path) -> None:
    copied, url = tmp_path / "copied", f"file://{trained}"
    for address in (url, "s3://bucket/my run/step-000004"):
        with pytest.raises(UsageError) as error:
            options("--resume", address)
        assert (error.value.code, error.value.where) == ("options.remote-manifest", f"--resume {address}")
        command = error.value.hint.partition(": ")[2].partition(";")[0]
        assert shlex.split(command) == ["reshard", "pack", address, "--out", "DIR"]
    run("pack", url, "--out", copied)
    resume = options("--resume", copied).resume
    assert resumed_state(open_packed(copied), resume, is_launched=False) == state_of(trained)


def test_parameters_without_weight_decay_are_remembered(trained: Path) -> None:
    shape = open_packed(trained).shape
    lines = sorted(fqn for fqn, dims in shape.tensors.items() if len(dims) == 1)
    bare = {**GROUP, "weight_decay": 0.0, "fqns": lines}
    state_with(optimizer={**STATE["optimizer"], "groups": [GROUP, bare]})(trained)
    state = resumed_state(open_packed(trained), options("--resume", trained).resume, is_launched=False)
    assert state is not None
    assert state.optimizer is not None
    recalled = recall(options("--resume", trained), remembered(state))
    assert (recalled.optim.weight_decay, recalled.optim.weight_decay_1d) == (GROUP["weight_decay"], False)
    position = DataPosition(num_sequences=0, digest="blake3:" + 64 * "0")
    again = remember(recalled, shape, step=60, num_tokens=0, data=position)
    assert again.optimizer == state.optimizer


def state_with(**changes: Any) -> Callable[[Path], None]:
    def act(trained: Path) -> None:
        change_manifest(trained, lambda document: document["training"].update(changes))

    return act


def without_moments(trained: Path) -> None:
    def change(document: dict[str, Any]) -> None:
        document["training"] = {"step": 60, "num_tokens": 0}
        for stage in document["stages"]:
            del stage["shards"][1:]

    change_manifest(trained, change)


@pytest.mark.parametrize(
    ("change", "code"),
    [
        (without_moments, "resume.no-optimizer-state"),
        (state_with(dtype="F16"), "resume.other-optimizer"),
        (state_with(reduce_dtype="F16"), "resume.other-optimizer"),
    ],
    ids=["none", "dtype", "reduce-dtype"],
)
def test_state_that_the_runner_cannot_resume_is_refused(
    change: Callable[[Path], None], code: str, trained: Path, wording: Wording, request: pytest.FixtureRequest
) -> None:
    change(trained)
    with pytest.raises(InputError) as error:
        resumed_state(open_packed(trained), options("--resume", trained).resume, is_launched=False)
    assert (error.value.code, error.value.where) == (code, f"{trained}/manifest.json")
    if request.node.callspec.id != "reduce-dtype":
        wording(str(error.value))
    weights_only = options("--resume", trained, "--resume-weights-only").resume
    assert resumed_state(open_packed(trained), weights_only, is_launched=False) is None


def test_state_of_what_a_run_froze_is_missed_before_anything_is_read(trained: Path, wording: Wording) -> None:
    text = encode_trained(fqn for fqn in open_packed(trained).shape.trained if "layers" in fqn)
    (trained / TRAINED_NAME).write_bytes(text)
    record = {"path": TRAINED_NAME, "nbytes": len(text), "digest": digest_bytes(text)}
    change_manifest(trained, lambda document: document["files"].append(record))
    origin = open_packed(trained)
    training = origin.manifest.training
    for accepted, state in ((options("--train-only", "layers"), training), (options(), None)):
        check_state_of_all(origin, accepted, state)
    for refused in (options(), options("--train-only", "norm")):
        with pytest.raises(InputError) as error:
            check_state_of_all(origin, refused, training)
        assert (error.value.code, error.value.where) == ("resume.no-optimizer-state", f"{trained}/manifest.json")
    wording(str(error.value))


def test_embedding_and_head_that_mtp_layers_copy_are_not_frozen(tmp_path: Path) -> None:
    (tmp_path / "source").mkdir()
    (tmp_path / "source" / "config.json").write_text(json.dumps({**config_of(1), "dtype": "float32"}))
    weights = {fqn: weight.clone() for fqn, weight in random_weights(1).items()}
    save_file(weights, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    packed = pack(tmp_path / "source", tmp_path / "packed", "pp=1")
    text = encode_trained([EMBEDDING, HEAD, *(fqn for fqn in weights if "layers.4." in fqn)])
    (packed / TRAINED_NAME).write_bytes(text)
    record = {"path": TRAINED_NAME, "nbytes": len(text), "digest": digest_bytes(text)}
    change_manifest(packed, lambda document: document["files"].append(record))
    group = ParameterGroup(beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
    optimizer = OptimizerState(name="AdamW", max_norm=1.0, groups=(group,), ema=0.9)
    training = TrainingState(step=1, num_tokens=8, optimizer=optimizer)
    for layers, num_notes in ((r"layers\.4\.", 0), ("layers.4.enorm", 1)):
        notes = check_state_of_all(open_packed(packed), options("--train-only", layers, "--ema", "0.9"), training)
        assert len(notes) == num_notes


@pytest.mark.parametrize(
    "text",
    [
        b'{"version": 2, "steps": {}}',
        b'{"version": 1, "steps": {"a": -1}}',
        b'{"version": 1, "steps": {"a": true}}',
        b"[]",
    ],
)
def test_damaged_step_counts_are_refused_and_others_are_read(text: bytes, trained: Path) -> None:
    assert differing_steps(open_packed(trained)) == {}
    counts = {"model.norm.weight": 7, "lm_head.weight": 0}
    for content in (encode_steps(counts), text):
        (trained / STEPS_NAME).write_bytes(content)
        record = {"path": STEPS_NAME, "nbytes": len(content), "digest": digest_bytes(content)}
        change_manifest(trained, lambda document, record=record: document["files"].append(record))  # type: ignore[misc]
        if content != text:
            assert differing_steps(open_packed(trained)) == counts
            change_manifest(trained, lambda document: document["files"].pop())
    with pytest.raises(InputError) as error:
        differing_steps(open_packed(trained))
    assert str(error.value.where).startswith(str(trained / STEPS_NAME))


def other(tmp_path: Path, **config: Any) -> Packed:
    return open_packed(write_trained(tmp_path / "other", "pp=1", **{"num_hidden_layers": 1, **config}))


@pytest.mark.parametrize(
    "config",
    [
        {"architectures": ["MistralForCausalLM"]},
        {"vocab_size": 48},
        {"num_hidden_layers": 2},
        {"tie_word_embeddings": True},
    ],
    ids=lambda config: next(iter(config)),
)
def test_another_model_is_refused(config: dict[str, Any], packed: Path, tmp_path: Path, wording: Wording) -> None:
    origin = other(tmp_path, **config)
    with pytest.raises(InputError) as error:
        check_fits(origin, open_packed(packed))
    assert (error.value.code, error.value.where) == ("resume.other-model", origin.where)
    wording(str(error.value))


def test_another_tokenizer_is_refused(packed: Path, trained: Path, wording: Wording) -> None:
    change_file(trained, "tokenizer.json", b"{}")
    with pytest.raises(InputError) as error:
        check_fits(open_packed(trained), open_packed(packed))
    assert (error.value.code, error.value.where) == ("resume.other-model", f"{trained}/manifest.json")
    wording(str(error.value))


def test_config_that_differs_in_what_no_tensor_shows_is_said(packed: Path, trained: Path) -> None:
    config = json.loads((trained / "config.json").read_text())
    change_file(trained, "config.json", json.dumps({**config, "rope_theta": 500000.0}).encode())
    assert check_fits(open_packed(trained), open_packed(packed)) == (
        "config.json: rope_theta is None here, 500000.0 in the checkpoint",
    )
    assert check_fits(open_packed(packed), open_packed(packed)) == ()


def test_flags_that_are_written_win_and_are_said(trained: Path) -> None:
    state, asked = state_of(trained), options("--lr", "0.01", "--seq-len", "8", "--steps", "200", "--dtype", "bf16")
    found = recall(asked, remembered(state))
    assert (found.optim.lr, found.steps, found.optim.decay_steps) == (0.01, 200, 90)
    assert (found.compute.dtype, found.compute.master_dtype, found.compute.reduce_dtype) == ("bf16", "fp32", "fp32")
    assert override_notes(asked, state) == (
        "--dtype bf16 overrides fp32 of the checkpoint",
        "--lr 0.01 overrides 0.002 of the checkpoint",
    )


@pytest.mark.parametrize(
    ("stored", "flags", "dtypes"),
    [
        (("F32", None), (), ("fp32", "fp32")),
        (("F32", None), ("--dtype", "bf16", "--master-dtype", "bf16"), ("bf16", "bf16")),
        (("F32", "BF16"), ("--master-dtype", "bf16"), ("bf16", "bf16")),
        (("F32", "BF16"), ("--dtype", "fp32"), ("fp32", "fp32")),
        (("BF16", None), (), ("bf16", "bf16")),
        (("BF16", None), ("--dtype", "fp32"), ("fp32", "fp32")),
        (("BF16", None), ("--master-dtype", "fp32"), ("bf16", "fp32")),
    ],
)
def test_masters_keep_the_precision_of_the_checkpoint_unless_it_is_given(
    trained: Path, stored: tuple[str, str | None], flags: tuple[str, ...], dtypes: tuple[str, str]
) -> None:
    state = replace(state_of(trained), dtype=stored[0], compute_dtype=stored[1])
    found = continued(state, "--resume", trained, *flags).compute
    assert (found.dtype, found.master_dtype) == dtypes


def continued(state: TrainingState, *args: object) -> TrainOptions:
    """Return the options of a run that resumes, with those of the checkpoint."""
    return recall(options(*args), remembered(state))


def test_end_of_a_decay_that_a_constant_rate_never_had_is_not_remembered(trained: Path) -> None:
    assert STATE["learning_rate"]["decay_steps"] == 90
    rate = LearningRate(peak=0.002, warmup_steps=3, decay="constant", decay_steps=90, minimum=0.0)
    constant = replace(state_of(trained), step=90, learning_rate=rate)
    asked = continued(constant, "--decay", "cosine", "--steps", 120)
    assert (asked.optim.lr, asked.optim.warmup_steps, asked.optim.decay_steps) == (0.002, 3, 120)
    assert [rate_at(step, asked.optim.schedule) > 0 for step in (89, 90, 119, 120)] == [True, True, True, False]
    decaying = continued(constant, "--decay", "sqrt", "--stable-steps", 87, "--steps", 120)
    assert [rate_at(step, decaying.optim.schedule) for step in (89, 90, 120)] == [0.002, 0.002, 0.0]
    assert override_notes(options("--decay", "cosine", "--decay-steps", 120), constant) == (
        "--decay cosine overrides constant of the checkpoint",
    )


@pytest.mark.parametrize(
    ("step", "args", "flag"),
    [
        (60, ("--steps", 90), ""),
        (90, ("--steps", 90), "--steps"),
        (60, ("--steps", 200), "--decay-steps"),
        (90, ("--steps", 200), "--decay-steps"),
        (90, ("--steps", 200, "--decay-steps", 200), ""),
        (90, ("--steps", 200, "--decay", "constant"), ""),
    ],
)
def test_steps_that_are_taken_and_a_decay_that_has_ended_are_noted(
    step: int, args: tuple[object, ...], flag: str, trained: Path, wording: Wording
) -> None:
    state = replace(state_of(trained), step=step)
    found = schedule_notes(continued(state, *args), state)
    assert len(found) == bool(flag)
    assert all(f"increase {flag}" in note for note in found)
    if (step, flag) in ((90, "--steps"), (60, "--decay-steps")):
        wording(found[0])


@pytest.mark.parametrize(
    ("written", "stored", "found"),
    [
        ("", None, "fp32"),
        ("--reduce-dtype bf16", "BF16", "bf16"),
        ("--dtype bf16", None, "bf16"),
        ("--dtype bf16 --master-dtype fp32", None, "fp32"),
        ("--dtype bf16 --master-dtype fp32 --reduce-dtype bf16", "BF16", "bf16"),
        ("--dtype bf16 --reduce-dtype fp32", "F32", "fp32"),
    ],
)
def test_dtype_of_sums_over_ranks_is_remembered_where_it_is_one_of_its_own(
    written: str, stored: str | None, found: str, trained: Path
) -> None:
    data = state_of(trained).data
    assert data is not None
    state = remember(options(*written.split()), open_packed(trained).shape, step=1, num_tokens=1, data=data)
    assert state.reduce_dtype == stored
    assert continued(state).compute == options(*written.split()).compute
    other = "fp32" if found == "bf16" else "bf16"
    assert override_notes(options("--reduce-dtype", found), state) == ()
    assert override_notes(options("--reduce-dtype", other), state) == (
        f"--reduce-dtype {other} overrides {found} of the checkpoint",
    )
