"""Options that are declared as dataclass fields: their flags, their defaults, and what values become of them."""

from __future__ import annotations

from runner.config.declared import parameters_of
from runner.config.flags import TrainOptions, parse_training, training_command


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
