"""Options that make no sense are refused before anything starts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click
import pytest

from manifests.errors import UsageError
from runner.config.declared import parameters_of
from runner.config.flags import TrainOptions, parse_training, training_command
from runner.config.schema import BatchOptions, DataOptions, OptimOptions
from runner.launch.command import launch


@pytest.mark.parametrize(("global_batch", "microbatch"), [(8, 3), (2, 4)])
def test_batch_that_cannot_be_split_is_refused(
    global_batch: int, microbatch: int, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UsageError) as error:
        BatchOptions(global_batch=global_batch, microbatch=microbatch, seq_len=8)
    assert (error.value.where, error.value.code) == ("--global-batch", "options.batch-size")
    wording(str(error.value))


@pytest.mark.parametrize("flag", ["--global-batch", "--microbatch", "--seq-len", "--loss-chunk"])
def test_count_of_none_is_refused(flag: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_training(["--data", "synthetic", flag, "0"])
    assert (error.value.where, error.value.code) == (flag, "usage.arguments")


@pytest.mark.parametrize("flag", ["--lr", "--ema", "--z-loss", "--label-smoothing", "--router-bias-rate"])
@pytest.mark.parametrize("number", ["nan", "inf"])
def test_number_that_is_not_finite_is_refused(flag: str, number: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_training(["--data", "synthetic", flag, number])
    assert error.value.where == flag


@pytest.mark.parametrize(
    ("fields", "where", "code"),
    [
        ({"eps": 0.0}, "--eps", "options.invalid-value"),
        ({"eps": float("nan")}, "--eps", "options.invalid-value"),
        ({"max_norm": float("nan")}, "--max-norm", "options.invalid-value"),
        ({"decay": "cosine", "warmup_steps": 5, "decay_steps": 5}, "--decay-steps", "options.decay-too-short"),
        (
            {"decay": "cosine", "warmup_steps": 3, "stable_steps": 3, "decay_steps": 5},
            "--decay-steps",
            "options.decay-too-short",
        ),
    ],
)
def test_optimizer_value_out_of_range_is_refused(
    fields: dict[str, Any], where: str, code: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UsageError) as error:
        OptimOptions(**fields)
    assert (error.value.where, error.value.code) == (where, code)
    wording(str(error.value))


@pytest.mark.parametrize(
    ("fields", "where", "code"),
    [
        ({"sources": ()}, "--data", "options.invalid-value"),
        ({"sources": ("synthetic", "a.txt")}, "--data", "options.invalid-value"),
        ({"weights": (1.0,)}, "--data-weight", "options.data-weights"),
        ({"weights": (1.0, -0.5)}, "--data-weight", "options.data-weights"),
        ({"weights": (1.0, float("nan"))}, "--data-weight", "options.data-weights"),
        ({"weights": (0.0, 0.0)}, "--data-weight", "options.data-weights"),
        ({"weights": (5e-324, 0.0)}, "--data-weight", "options.data-weights"),
        ({"sources": ("synthetic",), "weights": (1.0,)}, "--data-weight", "options.needs-documents"),
        ({"sources": ("synthetic",), "shuffle": True}, "--shuffle", "options.needs-documents"),
        ({"sources": ("synthetic",), "document_mask": True}, "--document-mask", "options.needs-documents"),
        ({"document_mask": True, "pack": False}, "--document-mask", "options.document-mask"),
    ],
)
def test_data_options_that_conflict_are_refused(
    fields: dict[str, Any], where: str, code: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UsageError) as error:
        DataOptions(**{"sources": ("a.txt", "b.txt"), **fields})
    assert (error.value.where, error.value.code) == (where, code)
    wording(str(error.value))


@pytest.mark.parametrize(
    ("args", "where", "code"),
    [
        (("--restart-data",), "--restart-data", "options.needs-resume"),
        (("--seed", "-1"), "--seed", "usage.arguments"),
        (("--master-dtype", "bf16"), "--master-dtype", "options.master-dtype"),
        (("--ac", "0"), "--ac", "options.invalid-value"),
        (("--ac", "some"), "--ac", "options.invalid-value"),
        (("--trace", "5-3"), "--trace", "options.invalid-value"),
        (("--keep", "2"), "--keep", "options.needs-checkpoint"),
        (("--resume", "step-3"), "--resume step-3", "options.needs-checkpoint"),
        (("--resume", "auto", "--resume-weights-only"), "--resume-weights-only", "options.auto-weights-only"),
        (("--stage-to-local", "scratch"), "--stage-to-local scratch", "options.relative-cache"),
        (("--router-aux-loss", "0.1", "--tokenized", "--token-weights", "w"), "--router-aux-loss", "options.router"),
        (("--router-aux-loss", "0.1", "--loss", "pairs"), "--router-aux-loss", "options.router"),
        (("--save", "s3://bucket/trained"), "--save", "options.invalid-value"),
        (("--checkpoint", "gs://bucket/run"), "--checkpoint", "options.invalid-value"),
        (("--log-dir", "hf://org/log"), "--log-dir", "options.invalid-value"),
        (
            ("--resume", "s3://bucket/step-000100"),
            "--resume s3://bucket/step-000100",
            "options.remote-manifest",
        ),
    ],
)
def test_flags_that_make_no_sense_are_refused(
    args: tuple[str, ...], where: str, code: str, wording: Callable[[str], None]
) -> None:
    with pytest.raises(UsageError) as error:
        parse_training(["--data", "a.txt", *args])
    assert (error.value.where, error.value.code) == (where, code)
    wording(str(error.value))


@pytest.mark.parametrize("command", [training_command, launch], ids=["training", "launch"])
def test_help_has_every_flag_in_one_group_and_a_dozen_first(command: click.Command) -> None:
    names = [name for of_group in command.groups.values() for name in of_group]
    assert sorted(names) == sorted(param.name for param in command.params if isinstance(param, click.Option))
    with click.Context(command) as context:
        shown = command.get_help(context)
    titles = [line.removesuffix(":") for line in shown.splitlines() if line[:1].isalpha() and line.endswith(":")]
    assert [title for title in titles if title in command.groups] == [*command.groups]
    assert len(next(iter(command.groups.values()))) <= 12


# Options that are declared as dataclass fields: their flags, their defaults, and what values become of them.


def test_every_training_flag_is_named_once_and_has_a_help_text() -> None:
    options = [*parameters_of(TrainOptions)]
    spelled = [word for option in options for word in (*option.opts, *option.secondary_opts)]
    assert len(set(spelled)) == len(spelled)
    assert [option.name for option in options if not option.help] == []
    assert [param.name for param in training_command.params] == [option.name for option in options]


def test_defaults_that_other_flags_decide_follow_them() -> None:
    options = parse_training(["--data", "synthetic", "--dtype", "bf16", "--steps", "7", "--timeout", "5"])
    assert (options.compute.master_dtype, options.compute.reduce_dtype) == ("bf16", "bf16")
    assert (options.optim.decay_steps, options.step_timeout_s) == (7, 10)
    assert options.values["master_dtype"] is None  # what was written, for a resumed run
