"""Tables as text: torch loads what we write, we read what torch writes, and what cannot run is refused."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import ScheduleError
from manifests.placement import Placement
from manifests.schedules.actions import LoweredTable
from manifests.schedules.csvtext import read_csv, write_csv
from manifests.schedules.lowering import lower
from manifests.schedules.rules import SCHEDULES
from manifests.schedules.tables import schedule_table
from runner.pipeline.torch_runtime import ADAPTER
from tests.fast.manifests.schedules.torch_tables import (
    LOOPED,
    V_SHAPED,
    Rows,
    placed,
    placements_of,
    rows_of,
    text_with_waits,
    torch_runtime,
    torch_schedule,
)
from tests.refusals import refusal

MULTI = [*LOOPED, *V_SHAPED]
MEGATRON = schedule_table("Interleaved1F1B", placed(2, 2), 5, microbatch_group=3)


def all_rows(order: dict[int, list[Any]]) -> Rows:
    """Give torch's table without idle time, and without the waits that torch 2.15 adds."""
    kept = [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]
    return [[action for action in actions if "WAIT_" not in action] for actions in kept]


def comparable(rows: Rows) -> list[Any]:
    """Give what torch's lowering has in common with ours: all of it; in 2.15, computations and the set of the rest.

    There, it places some receives and reshards elsewhere.
    """
    if not ADAPTER.waits_for_sends:
        return reshards_sorted(rows)
    is_other = re.compile("SEND|RECV|SHARD|REDUCE").search
    return [
        ([step for step in row if not is_other(step)], sorted(step for step in row if is_other(step))) for row in rows
    ]


def reshards_sorted(rows: Rows) -> Rows:
    """Sort adjacent RESHARDs: torch keeps them in a set, whose order means nothing."""
    sorted_rows = []
    for row in rows:
        done: list[str] = []
        together: list[str] = []
        for step in [*row, ""]:
            if step.endswith("RESHARD"):
                together.append(step)
            else:
                done += [*sorted(together), step]
                together = []
        sorted_rows.append(done)
    return sorted_rows


@pytest.mark.parametrize("name", MULTI)
def test_lowered_table_equals_torchs(name: str) -> None:
    num_tables = 0
    for num_ranks in (1, 2, 3, 4):
        for placement in [*placements_of(name, num_ranks), *([placed(num_ranks, 5)] if name in LOOPED else [])]:
            for num_microbatches in (1, 2, 3, 6, 8, 12):
                if name == "DualPipeV" and num_microbatches < placement.num_stages:
                    continue
                expected = all_rows(torch_schedule(name, placement, num_microbatches).pipeline_order_with_comms)
                found = rows_of(lower(schedule_table(name, placement, num_microbatches)))
                assert comparable(found) == comparable(expected), (placement, num_microbatches)
                num_tables += 1
    assert num_tables >= 12


@pytest.mark.parametrize("name", ["megatron", *SCHEDULES])
def test_torchs_runtime_loads_what_we_write_and_has_our_table(name: str, tmp_path: Path) -> None:
    placement = placed(2, 2) if name == "megatron" else placements_of(name, 2)[0]
    table = MEGATRON if name == "megatron" else schedule_table(name, placement, 6)
    path = tmp_path / "table.csv"

    path.write_text(write_csv(table))
    runtime = torch_runtime(placement, table.num_microbatches)
    runtime._load_csv(str(path))
    assert all_rows(runtime.pipeline_order) == rows_of(table)
    assert comparable(all_rows(runtime.pipeline_order_with_comms)) == comparable(rows_of(lower(table)))
    assert runtime.stage_index_to_group_rank == {
        stage: placement.rank_of(stage) for stage in range(placement.num_stages)
    }

    path.write_text(text_with_waits(lower(table)) if ADAPTER.waits_for_sends else write_csv(lower(table)))
    runtime = torch_runtime(placement, table.num_microbatches)
    runtime._load_csv(str(path), format="compute_comms")
    assert all_rows(runtime.pipeline_order_with_comms) == rows_of(lower(table))


@pytest.mark.parametrize("name", SCHEDULES)
def test_waits_that_torch_2_15_writes_are_dropped(name: str) -> None:
    table = schedule_table(name, placements_of(name, 2)[0], 6)
    text = text_with_waits(lower(table))
    assert text.count("WAIT_SEND_") == write_csv(lower(table)).count("SEND_") > 0
    assert read_csv(text, "table.csv", table.placement) == table


@pytest.mark.parametrize("name", MULTI)
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    placement = placements_of(name, 4)[0]
    schedule, path = torch_schedule(name, placement, 8), tmp_path / "table.csv"
    schedule._dump_csv(str(path), format="compute_only")
    assert read_csv(path.read_text(), "table.csv", placement) == schedule_table(name, placement, 8)
    schedule._dump_csv(str(path), format="compute_comms")
    assert read_csv(path.read_text(), "table.csv", placement) == schedule_table(name, placement, 8)


@given(st.data())
def test_reading_returns_what_was_written(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    placement = data.draw(st.sampled_from(placements_of(name, data.draw(st.integers(1, 4)))))
    table = schedule_table(name, placement, placement.num_stages)
    assert read_csv(write_csv(table), "table.csv", placement) == table
    assert read_csv(write_csv(lower(table)), "table.csv", placement) == table


@pytest.mark.parametrize(
    ("text", "code", "place"),
    [
        ("", "idle-rank", ""),
        ("0F0,0B0\n\n", "idle-rank", ": row 2"),
        ('0F0,"0B0', "not-csv", ""),
        ("0F0,0X0\n", "invalid-action", ": row 1, cell 2"),
        ("0F0,(0B0;0F1)OVERLAP_F_B\n", "invalid-action", ": row 1, cell 2"),
        ("0F0,0F0,0B0\n1F0,1B0\n", "wrong-actions", ""),
        ("0F0,0F1,0B0,0I1\n1F0,1B0\n", "wrong-actions", ""),
        ("0F0,0B0\n1B0,1F0\n", "deadlock", ""),
        ("0F0,0B0,0F999999\n", "wrong-actions", ""),
        ("0F0,0B0,999999F0\n", "misplaced-stages", ""),
    ],
)
def test_table_that_cannot_run_is_refused_with_every_reason(
    text: str, code: str, place: str, wording: Callable[[str], None]
) -> None:
    error = refusal(lambda: read_csv(text, "table.csv", placed(text.count("\n") or 1)))
    assert (error.code, error.where) == (f"schedule.{code}", f"table.csv{place}")
    wording(str(error))


@pytest.mark.parametrize(
    ("written", "read"),
    [(placed(2, 2), placed(2, 2, "v")), (placed(2), placed(4)), (placed(2, 2), placed(2))],
    ids=["style", "ranks", "stages"],
)
def test_stages_placed_otherwise_than_in_the_layout_are_refused(
    written: Placement, read: Placement, wording: Callable[[str], None]
) -> None:
    text = write_csv(schedule_table("GPipe" if written.num_virtual == 1 else "LoopedBFS", written, 2))
    error = refusal(lambda: read_csv(text, "table.csv", read))
    assert (error.code, error.where) == ("schedule.misplaced-stages", "table.csv")
    wording(str(error))


def without(table: LoweredTable, rank: int, position: int) -> str:
    rows = rows_of(table)
    computed = [at for at, cell in enumerate(rows[rank]) if not re.search("SEND|RECV|SHARD|REDUCE", cell)]
    del rows[rank][computed[position]]
    return "".join(",".join(row) + "\n" for row in rows)


CELLS = st.sampled_from(
    ["0F0", "0B0", "1F0", "1B0", "0I0", "0W0", "2F1", "1RECV_F0", "0REDUCE_GRAD", "", '"', "x", "(", "0F"]
)
TEXTS = st.text("01FBIW,\n;()SENDRECV_\"' ") | st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=4).map(
    "\n".join
)


@given(TEXTS, st.sampled_from([placed(1), placed(1, 2), placed(2)]))
def test_any_text_is_read_or_refused(text: str, placement: Placement) -> None:
    with suppress(ScheduleError):
        read_csv(text, "table.csv", placement)
