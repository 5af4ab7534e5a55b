"""Options that make no sense are refused before anything starts."""

from __future__ import annotations

from typing import Any

import pytest

from manifests.errors import UsageError
from runner.config.flags import parse_training
from runner.config.schema import BatchOptions, DataOptions, OptimOptions


@pytest.mark.parametrize(
    ("counts", "message"),
    [
        ((0, 1, 8), "--global-batch: expected at least 1, found 0"),
        ((8, 0, 8), "--microbatch: expected at least 1, found 0"),
        ((8, 1, 0), "--seq-len: expected at least 1, found 0"),
        (
            (8, 3, 8),
            "--global-batch: expected a multiple of --microbatch 3, found 8\nhint: the next ones are 6 and 9",
        ),
        (
            (2, 4, 8),
            "--global-batch: expected a multiple of --microbatch 4, found 2\nhint: the next one is 4",
        ),
    ],
)
def test_batch_that_cannot_be_cut_is_refused(counts: tuple[int, int, int], message: str) -> None:
    with pytest.raises(UsageError) as error:
        BatchOptions(global_batch=counts[0], microbatch=counts[1], seq_len=counts[2])
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"lr": -1.0}, "--lr: expected a number from 0 up, found -1.0"),
        ({"eps": 0.0}, "--eps: expected a number from 1e-30 up, found 0.0"),
        ({"eps": float("nan")}, "--eps: expected a number from 1e-30 up, found nan"),
        ({"max_norm": float("nan")}, "--max-norm: expected a number from 0 up, found nan"),
        ({"beta2": 1.0}, "--beta2: expected a number from 0 up to below 1, found 1.0"),
        (
            {"decay": "cosine", "warmup_steps": 5, "decay_steps": 5},
            "--decay-steps: expected more than --warmup-steps 5, found 5\n"
            "hint: where it is not written, the decay ends at --steps",
        ),
    ],
)
def test_optimizer_value_out_of_range_is_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        OptimOptions(**fields)
    assert str(error.value) == message


@pytest.mark.parametrize("sources", [(), ("synthetic", "a.txt")])
def test_sources_that_do_not_go_together_are_refused(sources: tuple[str, ...]) -> None:
    with pytest.raises(UsageError) as error:
        DataOptions(sources=sources)
    assert str(error.value) == "--data: expected files, folders or globs, or the one word 'synthetic'"


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"weights": (1.0,)}, "--data-weight: expected one for each of 2 --data, found 1"),
        ({"weights": (1.0, -0.5)}, "--data-weight: expected a number from 0 up, found -0.5"),
        ({"weights": (1.0, float("nan"))}, "--data-weight: expected a number from 0 up, found nan"),
        ({"weights": (0.0, 0.0)}, "--data-weight: expected a sum above 0, found 0.0"),
        ({"weights": (5e-324, 0.0)}, "--data-weight: expected a sum above 0, found 5e-324"),
        (
            {"sources": ("synthetic",), "weights": (1.0,)},
            "--data-weight: needs documents, and --data synthetic has none",
        ),
        ({"sources": ("synthetic",), "shuffle": True}, "--shuffle: needs documents, and --data synthetic has none"),
    ],
)
def test_orders_and_weights_that_do_not_fit_the_sources_are_refused(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError) as error:
        DataOptions(**{"sources": ("a.txt", "b.txt"), **fields})
    assert str(error.value) == message


@pytest.mark.parametrize(
    ("args", "where", "code"),
    [
        (("--restart-data",), "--restart-data", "options.needs-resume"),
        (("--seed", "-1"), "training options", "usage.arguments"),
        (("--seed", "-1", "--shuffle"), "training options", "usage.arguments"),
    ],
)
def test_flag_that_means_nothing_here_is_refused(args: tuple[str, ...], where: str, code: str) -> None:
    with pytest.raises(UsageError) as error:
        parse_training(["--data", "a.txt", *args])
    assert (error.value.where, error.value.code) == (where, code)
