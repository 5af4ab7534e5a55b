"""Options that are declared as dataclass fields: their flags, their defaults, and what values become of them."""

from __future__ import annotations

from dataclasses import dataclass

import click

from runner.config.declared import build, flag, group, parameters_of
from runner.config.flags import TrainOptions, parse_training, training_command


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner:
    size: int = flag("--size", type=int, default=3, help="Size.")
    is_quick: bool = flag("--slow", is_flag=True, read=lambda slow: not slow)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer:
    name: str = flag("--name", required=True)
    inner: Inner = group(Inner)
    maybe: Inner | None = group(Inner, unless_none="name")
    note: str = ""


def test_flags_are_those_of_the_fields_in_their_order() -> None:
    assert [option.name for option in parameters_of(Outer)] == ["name", "size", "slow", "size", "slow"]
    assert all(isinstance(option, click.Option) for option in parameters_of(Outer))


def test_values_become_fields_through_their_readers() -> None:
    values = {"name": None, "size": 5, "slow": True}
    assert build(Outer, values, note="x") == Outer(
        name=None,  # type: ignore[arg-type]
        inner=Inner(size=5, is_quick=False),
        maybe=None,
        note="x",
    )
    assert build(Outer, {**values, "name": "a"}).maybe == Inner(size=5, is_quick=False)


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
