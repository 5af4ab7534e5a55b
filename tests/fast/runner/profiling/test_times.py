"""Where a step's seconds went, from schedules that run on paper, whose transfers cost a known time."""

from __future__ import annotations

import sys
import threading
import time
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from manifests.placement import Placement
from manifests.schedules.actions import Table
from manifests.schedules.simulation import StageCosts, Timeline, simulate
from manifests.schedules.tables import schedule_table
from runner.distributed.watchdog import enable_flight_recorder
from runner.pipeline.timetable import Timetable
from runner.profiling.step_times import RankTimes, SplitProcess, split_step, stage_costs
from runner.profiling.trace import Clock, Recorder

CASES = (("1F1B", 4, "loop", 6), ("Interleaved1F1B", 8, "loop", 8), ("ZBVZeroBubble", 8, "v", 8))
REDUCE_S = 0.5


def table_of(schedule: str, num_stages: int, style: str, num_microbatches: int) -> Table:
    return schedule_table(schedule, Placement(num_stages=num_stages, num_ranks=4, style=style), num_microbatches)  # type: ignore[arg-type]


def costs_of(table: Table, hop_s: float) -> StageCosts:
    stages = range(table.placement.num_stages)
    return StageCosts(
        forward_s=tuple(1.0 + 0.1 * stage for stage in stages),
        input_s=tuple(1.2 for _ in stages),
        weight_s=tuple(0.9 for _ in stages),
        hop_s=hop_s,
    )


def rows_of(table: Table, timeline: Timeline, begins_s: list[float]) -> list[list[float]]:
    """Give what ranks would tell that have run this timeline."""
    rows = []
    for rank, spans in enumerate(timeline.ranks):
        row = [begins_s[rank], begins_s[rank], timeline.busy_s[rank], spans[-1].end_s - begins_s[rank], REDUCE_S]
        for stage in table.placement.stages_on(rank):
            for kind in "FBIWL":
                found = [s.end_s - s.start_s for s in spans if (s.action.stage, s.action.kind) == (stage, kind)]
                row.append(sum(found) / len(found) if found else 0.0)
        rows.append(row)
    return rows


def split(table: Table, hop_s: float, begins_s: list[float]) -> tuple[tuple[RankTimes, ...], Timeline]:
    """Split a step of ranks that wait for their data until these moments, and then keep to the schedule."""
    timeline = simulate(table, costs_of(table, hop_s), begins_s)
    window_s = timeline.makespan_s + REDUCE_S
    return split_step(table, rows_of(table, timeline, begins_s), window_s), timeline


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_without_transfers_all_waits_are_the_bubble_and_sums_are_communication(case: tuple[str, int, str, int]) -> None:
    table = table_of(*case)
    parts, timeline = split(table, 0.0, [0.0] * 4)
    for rank, found in enumerate(parts):
        assert found.compute_s == pytest.approx(timeline.busy_s[rank])
        assert found.communication_s == pytest.approx(REDUCE_S)
        assert found.bubble_s == pytest.approx(timeline.makespan_s - timeline.busy_s[rank])


@pytest.mark.parametrize("case", CASES, ids=lambda case: case[0])
def test_what_transfers_add_is_communication(case: tuple[str, int, str, int]) -> None:
    table = table_of(*case)
    slow, with_hops = split(table, 0.3, [0.0] * 4)
    _, without = split(table, 0.0, [0.0] * 4)
    for rank, found in enumerate(slow):
        later_s = with_hops.ranks[rank][-1].end_s - without.ranks[rank][-1].end_s
        assert later_s > 0
        assert found.communication_s == pytest.approx(later_s + REDUCE_S)


def test_rank_whose_data_is_late_makes_the_others_wait_and_is_no_communication() -> None:
    table = table_of("1F1B", 4, "loop", 6)
    prompt, _ = split(table, 0.0, [0.0] * 4)
    late, _ = split(table, 0.0, [7.0, 0.0, 0.0, 0.0])
    assert late[0].data_s == 7.0
    assert late[0].bubble_s == pytest.approx(prompt[0].bubble_s)
    for rank in (1, 2, 3):
        assert late[rank].bubble_s == pytest.approx(prompt[rank].bubble_s + 7.0)
        assert late[rank].communication_s == pytest.approx(REDUCE_S)


@given(
    hop_s=st.floats(0, 2),
    begins_s=st.lists(st.floats(0, 5), min_size=4, max_size=4),
    case=st.sampled_from(CASES),
)
def test_parts_add_up_to_the_time_until_the_norm_is_known(
    hop_s: float, begins_s: list[float], case: tuple[str, int, str, int]
) -> None:
    table = table_of(*case)
    parts, timeline = split(table, hop_s, begins_s)
    for found in parts:
        whole_s = found.data_s + found.compute_s + found.communication_s + found.bubble_s
        assert whole_s == pytest.approx(timeline.makespan_s + REDUCE_S)
        assert min(found.communication_s, found.bubble_s) >= 0


def test_clock_tells_what_a_rank_has_really_done(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]

    def work(seconds: float) -> None:
        now[0] += seconds

    monkeypatch.setattr("runner.profiling.trace.time.perf_counter", lambda: now[0])
    table = Timetable(name="1F1B", placement=Placement(num_stages=2, num_ranks=1)).planned(2)
    clock, recorder = Clock(table, 0), Recorder(torch.device("cpu"))
    for step in (1, 2):
        work(0.01)
        clock.note_data(0.01)
        recorder.start()
        for microbatch in (0, 1):
            for stage in (0, 1):
                with recorder.action("F", stage, microbatch):
                    work(0.01)
            recorder.loss(1, lambda: torch.zeros(()))()
            with recorder.action("B", 1, microbatch):
                work(0.02)
        recorder.stop()
        told = clock.read(recorder)
        assert len(told) == clock.num_times
        clock.note_exchange([told])
        (found,) = clock.split(step)
        assert found.data_s == 0.01
        assert found.compute_s == pytest.approx(0.08)
        assert found.communication_s + found.bubble_s == pytest.approx(0)


def test_what_comes_between_two_steps_is_left_out_of_the_second(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1.0]
    monkeypatch.setattr("runner.profiling.trace.time.perf_counter", lambda: now[0])
    table = Timetable(name="1F1B", placement=Placement(num_stages=1, num_ranks=1)).planned(1)
    begins_s = []
    for is_paused in (False, True):
        clock, recorder = Clock(table, 0), Recorder(torch.device("cpu"))
        for _ in range(2):
            clock.note_data(0.0)
            recorder.start()
            recorder.stop()
            numbers = clock.read(recorder)
            clock.note_exchange([numbers])
            now[0] += 100  # an evaluation
            if is_paused:
                clock.pause()
        begins_s.append(numbers[0])
    assert begins_s == [100, 0]


@pytest.mark.parametrize(
    ("num_microbatches", "expected"), [(6, [1, 2, 3, 4]), (256, [1, 14])], ids=["small", "2,048 actions"]
)
def test_timing_of_a_large_schedule_is_spread_over_steps(num_microbatches: int, expected: list[int]) -> None:
    """Simulating costs less than half a millisecond of each step."""
    clock = Clock(table_of("1F1B", 4, "loop", num_microbatches), 0)
    assert [step for step in range(1, 15) if clock.times(step)][:4] == expected
    clock.note_exchange([[0.0, 0.25, 1.5, 2.0, 0.0, *[0.0] * 5]] * 4)
    assert clock.data_s() == (0.25,) * 4


def test_large_schedule_is_split_by_another_process_as_this_one_would() -> None:
    table = table_of("1F1B", 4, "loop", 256)
    rows = [[0.0, 0.25, 1.5 + rank, 2.0, 0.125, *[0.001] * 5] for rank in range(4)]
    process = SplitProcess(table)
    process.submit(rows, 7.0)
    process.submit(rows, 8.0)
    results: list[tuple[RankTimes, ...]] = []
    deadline_s = time.monotonic() + 60
    while len(results) < 2 and time.monotonic() < deadline_s:
        results += filter(None, [process.take()])
        time.sleep(0.01)
    assert results == [split_step(table, rows, window_s) for window_s in (7.0, 8.0)]


def test_steps_do_not_pile_up_for_a_process_that_has_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    process, others = SplitProcess(table_of("1F1B", 4, "loop", 6)), set(threading.enumerate())
    process.submit([], 7.0)
    for thread in set(threading.enumerate()) - others:
        thread.join(60)
    before = process._requests.qsize()
    for _ in range(9):
        process.submit([], 7.0)
    assert (process._requests.qsize(), process.take()) == (before, ())


def test_actions_of_a_step_that_is_not_timed_are_not_recorded() -> None:
    recorder = Recorder(torch.device("cpu"))
    for is_timed in (True, False, True):
        recorder.start(is_timed=is_timed)
        with recorder.action("F", 0, 0):
            pass
        recorder.stop()
        assert len(recorder.take()) == is_timed
        assert recorder.begun_s <= recorder.ended_s


# What torch's flight recorder is told through the environment.


def test_recorder_is_on_and_writes_below_the_log_folder(tmp_path: Path) -> None:
    environment = {"HOME": "/root"}
    enable_flight_recorder(tmp_path / "log", environment)
    assert environment == {
        "HOME": "/root",
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{tmp_path}/log/flight-recorder/rank_",
    }
    assert (tmp_path / "log" / "flight-recorder").is_dir()


@pytest.mark.parametrize(
    "own",
    [
        {"TORCH_FR_BUFFER_SIZE": "0", "TORCH_FR_DUMP_TEMP_FILE": "/tmp/a_", "TORCH_NCCL_DUMP_ON_TIMEOUT": "0"},
        {
            "TORCH_NCCL_TRACE_BUFFER_SIZE": "7",
            "TORCH_NCCL_DEBUG_INFO_TEMP_FILE": "/tmp/b_",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "1",
        },
    ],
)
def test_what_the_user_has_set_stays_by_any_name_that_torch_knows(tmp_path: Path, own: dict[str, str]) -> None:
    environment = dict(own)
    enable_flight_recorder(tmp_path, environment)
    assert environment == own
    assert not (tmp_path / "flight-recorder").exists()


def test_stage_with_whole_and_split_backwards_keeps_the_time_of_each() -> None:
    costs = stage_costs([1, 1, 1], [3, 3, 0], [2, 0, 2], [2, 0, 1], [0, 0, 0]).by_kind()
    assert costs == {"F": (1, 1, 1), "I": (2, 1.5, 2), "W": (2, 1.5, 1), "B": (3, 3, 3)}
