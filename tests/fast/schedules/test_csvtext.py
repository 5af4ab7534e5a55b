"""Tables as text: torch loads what we write, we read what torch writes, and what cannot run is refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from manifests.errors import InputError
from manifests.schedules import (
    SCHEDULES,
    LoweredTable,
    Overlap,
    compute_part,
    lower,
    read_csv,
    read_lowered_csv,
    schedule_table,
    write_csv,
)
from tests.fast.schedules.torch_tables import (
    LOOPED,
    V_SHAPED,
    Rows,
    placed,
    placements_of,
    rows_of,
    torch_runtime,
    torch_schedule,
)

MULTI = [*LOOPED, *V_SHAPED]
MEGATRON = schedule_table("Interleaved1F1B", placed(2, 2), 5, microbatch_group=3)


def all_rows(order: dict[int, list[Any]]) -> Rows:
    return [[str(action) for action in order[rank] if action is not None] for rank in sorted(order)]


def reshards_sorted(rows: Rows) -> Rows:
    """Sort RESHARDs that stand together: torch keeps them in a set, whose order means nothing."""
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
                assert reshards_sorted(found) == reshards_sorted(expected), (placement, num_microbatches)
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
    assert reshards_sorted(all_rows(runtime.pipeline_order_with_comms)) == reshards_sorted(rows_of(lower(table)))
    assert runtime.stage_index_to_group_rank == {
        stage: placement.rank_of(stage) for stage in range(placement.num_stages)
    }

    path.write_text(write_csv(lower(table)))
    runtime = torch_runtime(placement, table.num_microbatches)
    runtime._load_csv(str(path), format="compute_comms")
    assert all_rows(runtime.pipeline_order_with_comms) == rows_of(lower(table))


@pytest.mark.parametrize("name", MULTI)
def test_what_torch_writes_is_read(name: str, tmp_path: Path) -> None:
    placement = placements_of(name, 4)[0]
    schedule, path = torch_schedule(name, placement, 8), tmp_path / "table.csv"
    schedule._dump_csv(str(path), format="compute_only")
    assert read_csv(path.read_text(), "table.csv") == schedule_table(name, placement, 8)
    schedule._dump_csv(str(path), format="compute_comms")
    lowered = read_lowered_csv(path.read_text(), "table.csv")
    assert rows_of(lowered) == all_rows(schedule.pipeline_order_with_comms)
    assert compute_part(lowered) == schedule_table(name, placement, 8)


@given(st.data())
def test_reading_gives_back_what_was_written(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(SCHEDULES))
    placement = data.draw(st.sampled_from(placements_of(name, data.draw(st.integers(1, 4)))))
    table = schedule_table(name, placement, placement.num_stages)
    assert read_csv(write_csv(table), "table.csv", placement) == table
    assert read_lowered_csv(write_csv(lower(table)), "table.csv", placement) == lower(table)


def test_overlap_is_read_as_one_step() -> None:
    table = schedule_table("DualPipeV", placed(2, 2, "v"), 6)
    assert any(isinstance(step, Overlap) for step in table.ranks[0])
    assert "(3F2;0B0)OVERLAP_F_B" in write_csv(table)
    spaced = write_csv(table).replace("(3F2;0B0)OVERLAP_F_B", ' "( 3F2 ; 0B0 )OVERLAP_F_B" ').replace(' "', '"')
    assert read_csv(spaced.replace('" ', '"'), "table.csv") == table


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "table.csv: the file is empty\nhint: expected one row of actions for each rank"),
        ("0F0,0B0\n\n", "table.csv: row 2: this rank computes nothing\nhint: each row is one rank's part"),
        ('0F0,"0B0', "table.csv: is not CSV: unexpected end of data"),
        (
            "0F0,0X0\n",
            "table.csv: row 1, cell 2: '0X0' is not an action\nhint: expected for example 2F0, 2B0, 2I0, 2W0 or "
            "(2F4;5B1)OVERLAP_F_B",
        ),
        (
            "0F0,(0B0;0F1)OVERLAP_F_B\n",
            "table.csv: row 1, cell 2: '(0B0;0F1)OVERLAP_F_B' is not an action\nhint: expected for example 2F0, 2B0, "
            "2I0, 2W0 "
            "or (2F4;5B1)OVERLAP_F_B",
        ),
        (
            "0UNSHARD,0F0,0B0\n",
            "table.csv: row 1, cell 1: '0UNSHARD' is not a compute action\nhint: this is a file of the format "
            "compute_comms",
        ),
        ("0F0,0B0\n1F0,1B0\n2F0,2B0,3F0,3B0\n", "table.csv: 4 stages do not divide over 3 rows, one for each rank"),
        (
            "0F0,0B0,3F0,3B0\n2F0,2B0,1F0,1B0,4F0,4B0,5F0,5B0\n",
            "table.csv: the stages are assigned to ranks neither in a loop nor in a v: rank 0 has 0, 3; rank 1 has "
            "1, 2, 4, 5",
        ),
        ("0F0,0F0,0B0\n1F0,1B0\n", "table.csv: 0F0 occurs 2 times"),
        (
            "0F0,0F1,0B0,0I1\n1F0,1B0\n",
            "table.csv: stage 0 takes microbatch 1 back by 0 B, 1 I, 0 W; expected 1 B, or 1 I and 1 W; "
            "stage 1 never computes microbatch 1",
        ),
        (
            "0F0,0B0\n1B0,1F0\n",
            "table.csv: rank 1 cannot start 1B0 before 1F0, which is not earlier in its own list",
        ),
        (
            "0F0,0B0,0F999999\n",
            "table.csv: "
            + "".join(f"stage 0 never computes microbatch {microbatch}; " for microbatch in range(1, 9))
            + "and so on",
        ),
        (
            "0F0,0B0,999999F0\n",
            "table.csv: "
            + "".join(f"stage {stage} never computes microbatch 0; " for stage in range(1, 9))
            + "and so on",
        ),
    ],
)
def test_table_that_cannot_run_is_refused_with_every_reason(text: str, message: str) -> None:
    with pytest.raises(InputError) as refused:
        read_csv(text, "table.csv")
    assert str(refused.value) == message


def test_stages_that_lie_otherwise_than_the_layout_are_refused() -> None:
    loop, v = placed(2, 2), placed(2, 2, "v")
    with pytest.raises(InputError) as refused:
        read_csv(write_csv(schedule_table("LoopedBFS", loop, 1)), "table.csv", v)
    assert str(refused.value) == (
        "table.csv: rank 0 has stage 2, which is placed on rank 1; rank 1 has stage 3, which is placed on rank 0"
    )
    text = write_csv(schedule_table("1F1B", placed(2), 2))
    with pytest.raises(InputError, match=r"^table\.csv: expected 4 rows, one for each rank, found 2$"):
        read_csv(text, "table.csv", placed(4))
    text = write_csv(schedule_table("Interleaved1F1B", loop, 2))
    with pytest.raises(InputError, match=r"^table\.csv: rank 0 has stage 2 of a layout with 2 stages; rank 1 has "):
        read_csv(text, "table.csv", placed(2))


TINY = lower(schedule_table("1F1B", placed(2), 2))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("0F0,0SEND_F0", "0SEND_F0,0F0", "rank 0 sends by 0SEND_F0 what it has not computed yet"),
        ("1RECV_F0,1F0", "1F0,1RECV_F0", "rank 1 computes 1F0 without having received its input"),
        ("1RECV_F0,", "1SEND_F0,", "1SEND_F0 has no other rank on its far side"),
        ("0REDUCE_GRAD", "0UNSHARD", "0REDUCE_GRAD occurs 0 times"),
        ("0SEND_F1,", "", "rank 0 sends nothing to rank 1, which takes it for 0SEND_F1"),
        ("0SEND_F1,", "0SEND_F1,0SEND_F1,", "rank 0 sends 0SEND_F1 to rank 1, which takes it for nothing"),
    ],
)
def test_transfers_that_would_hang_or_mix_up_tensors_are_refused(old: str, new: str, message: str) -> None:
    text = write_csv(TINY)
    assert text.count(old) == 1
    with pytest.raises(InputError) as refused:
        read_lowered_csv(text.replace(old, new), "table.csv")
    assert message in str(refused.value)


def test_tensor_sent_and_received_twice_is_refused() -> None:
    text = write_csv(TINY).replace("0SEND_F1,", "0SEND_F1,0SEND_F1,").replace("1RECV_F1,", "1RECV_F1,1RECV_F1,")
    with pytest.raises(InputError, match=r"^table\.csv: rank 1 receives twice by 1RECV_F1$"):
        read_lowered_csv(text, "table.csv")


def test_gradients_reduced_too_early_are_refused() -> None:
    text = write_csv(TINY).replace(",0REDUCE_GRAD", "").replace("0B1", "0REDUCE_GRAD,0B1")
    with pytest.raises(InputError, match=r"^table\.csv: rank 0 reduces stage 0 before 0B1$"):
        read_lowered_csv(text, "table.csv")


@pytest.mark.parametrize("name", ["ZBVZeroBubble", "InterleavedZeroBubble"])
def test_receives_that_torch_defers_past_one_another_are_refused(name: str) -> None:
    """See Note [Order of transfers]: torch runs these, and gives wrong gradients."""
    placement = placements_of(name, 2)[0]
    runtime = torch_runtime(placement, 6, defer_pp_recv=True)
    runtime._prepare_schedule_with_comms(torch_schedule(name, placement, 6).pipeline_order)
    text = "".join(",".join(row) + "\n" for row in all_rows(runtime.pipeline_order_with_comms))
    with pytest.raises(InputError, match=r"^table\.csv: rank 0 sends \dSEND_.\d to rank 1, which takes it for \dSEND_"):
        read_lowered_csv(text, "table.csv")


def without(table: LoweredTable, rank: int, position: int) -> str:
    rows = rows_of(table)
    del rows[rank][position]
    return "".join(",".join(row) + "\n" for row in rows)


@pytest.mark.parametrize("name", MULTI)
def test_no_step_that_matters_can_be_left_out(name: str) -> None:
    table = lower(schedule_table(name, placements_of(name, 2)[0], 4))
    for rank, steps in enumerate(table.ranks):
        for position, step in enumerate(steps):
            if not str(step).endswith("SHARD"):
                with pytest.raises(InputError):
                    read_lowered_csv(without(table, rank, position), "table.csv", table.placement)


CELLS = st.sampled_from(
    ["0F0", "0B0", "1F0", "1B0", "0I0", "0W0", "2F1", "1RECV_F0", "0REDUCE_GRAD", "", '"', "x", "(", "0F"]
)
TEXTS = st.text("01FBIW,\n;()SENDRECV_\"' ") | st.lists(st.lists(CELLS, max_size=6).map(",".join), max_size=4).map(
    "\n".join
)


def refusal(read: Callable[[str, str], object], text: str) -> str:
    try:
        read(text, "table.csv")
    except InputError as error:
        return str(error)
    return "table.csv: can run"


@given(TEXTS)
def test_any_text_is_read_or_refused(text: str) -> None:
    for read in (read_csv, read_lowered_csv):
        assert refusal(read, text).startswith("table.csv: ")
