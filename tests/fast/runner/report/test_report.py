"""A run's page, from metrics and traces whose numbers are known."""

from __future__ import annotations

import json
import math
import re
import time
from html import unescape
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from manifests.errors import InputError, LogError, UserError
from manifests.placement import Placement
from runner.profiling.step_times import PARTS
from runner.profiling.trace import profile_folder, profiled, trace_path
from runner.report.charts import draw_load
from runner.report.page import write_report, write_trace
from runner.report.read import check_line, read_run
from tests.fast.runner.profiling.traced import write_metrics, write_traces

CASES = (("1F1B", 4, "loop", 6), ("Interleaved1F1B", 8, "loop", 8), ("ZBVZeroBubble", 8, "v", 8))


def test_page_is_not_written_under_the_name_of_another_kind_of_file(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    with pytest.raises(UserError) as error:
        write_report(tmp_path, tmp_path / "r.pdf")
    assert error.value.where == "--out"
    assert not (tmp_path / "r.pdf").exists()


def test_page_that_exists_is_replaced_only_by_force(tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text("mine")
    with pytest.raises(InputError) as error:
        write_report(tmp_path, tmp_path / "report.html")
    assert (error.value.code, error.value.where) == ("output.exists", str(tmp_path / "report.html"))
    assert (tmp_path / "report.html").read_text() == "mine"


def test_page_stands_alone_and_tells_measured_and_planned(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    bubble = write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    said = write_report(tmp_path, tmp_path / "report.html")
    expected = f"4 steps, loss 3.9000 to 3.6000; 103 tokens/s; bubble {bubble:.1%} measured, {bubble:.1%} planned"
    assert said == expected
    page = (tmp_path / "report.html").read_text()
    assert f"</h1>\n<p class=lead>{expected}.</p>\n" in page
    assert page.count('<svg class="chart"') == 2
    assert page.count('<svg class="pipeline"') == 1
    assert "://" not in page.replace("'http://www.w3.org/2000/svg'", "")
    assert not re.search(r'(?:src|href)="|@import|url\(', page)
    assert "<td>bubble</td>" in page


def test_picture_of_the_pipeline_has_every_action_as_it_ran_and_as_planned(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    picture = page[page.index('<svg class="pipeline"') :]
    root = ElementTree.fromstring(picture[: picture.index("</svg>") + len("</svg>")])
    tips = [box.findtext("title") or "" for box in root.iter("rect") if box.get("class") == "act"]
    assert len(tips) == len(set(tips)) == 2 * 2 * 2 * 4  # measured and planned, ranks, forward and backward
    for how in ("ran", "planned"):
        assert f"rank 1, stage 1: forward, microbatch 0, {how}: 11.00 ms from 10.00 ms" in tips
    assert root.get("role") == "img"
    assert {"step 3", "1F1B"} <= set(re.findall(r"step \d|1F1B", root.findtext("title") or ""))
    assert root.findtext("desc")


def test_page_of_a_schedule_file_that_is_gone_has_no_plan(tmp_path: Path) -> None:
    for name in ("here", "gone"):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name)
        write_traces(tmp_path / name, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    for rank in (0, 1):
        trace = trace_path(tmp_path / "gone", rank)
        trace.write_text(trace.read_text().replace('"1F1B"', '"/on/another/node/<b>.csv"'))
    said = write_report(tmp_path / "gone", tmp_path / "report.html", other_dir=tmp_path / "here")
    assert "planned" not in said
    page = (tmp_path / "report.html").read_text()
    assert page.count('<svg class="pipeline"') == 2
    assert "of gone is drawn without its plan" in page
    assert "<b>" not in page
    write_report(tmp_path / "gone", tmp_path / "report.html", force=True)
    page = (tmp_path / "report.html").read_text()
    assert (page.count(", ran: "), page.count(", planned: ")) == (2 * 2 * 4, 0)


def test_two_runs_are_compared_on_one_page(tmp_path: Path) -> None:
    for name, num_steps in (("first", 4), ("second", 6)):
        (tmp_path / name).mkdir()
        write_metrics(tmp_path / name, num_steps)
        write_traces(tmp_path / name, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    write_report(tmp_path / "first", tmp_path / "report.html", other_dir=tmp_path / "second")
    page = (tmp_path / "report.html").read_text()
    assert "<h1>first, compared with second</h1>" in page
    assert "<th>first</th><th>second</th>" in page
    assert "<td>steps</td><td>1 to 4</td><td>1 to 6</td>" in page
    assert page.count('<svg class="pipeline"') == 2
    curves = json.loads(unescape(re.findall(r'data-curves="([^"]*)"', page)[0]))
    assert curves["values"]["training loss of second"] == [[s, 4.0 - s / 10] for s in range(1, 7)]
    with pytest.raises(UserError) as error:
        write_report(tmp_path / "first", tmp_path / "other.html", other_dir=tmp_path / "third")
    assert (error.value.code, error.value.where) == ("launch.no-run", str(tmp_path / "third"))


def test_loss_that_is_not_finite_is_an_alarm_and_a_gap_in_the_curve(tmp_path: Path) -> None:
    losses = [4.0, 3.0, math.nan, 2.0]
    write_lines(tmp_path, [{"step": s, "loss": loss, "tokens_per_s": 1.0} for s, loss in enumerate(losses, 1)])
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert re.search(r"<p class=alarm>.*at step 3</p>", page)
    path = re.findall(r'class="curve own" d="([^"]*)"', page)[0]
    assert path.count("M") == 2


@pytest.mark.parametrize(("schedule", "num_stages", "style", "num_microbatches"), CASES)
def test_merged_trace_has_a_slice_per_action_and_an_arrow_per_transfer_between_ranks(
    tmp_path: Path, schedule: str, num_stages: int, style: str, num_microbatches: int
) -> None:
    write_metrics(tmp_path)
    placement = Placement(num_stages=num_stages, num_ranks=4, style=style)  # type: ignore[arg-type]
    write_traces(tmp_path, schedule, placement, num_microbatches)
    assert write_trace(tmp_path, tmp_path / "merged.json") == 1
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    assert all(event["tid"] >= 0 and event.get("ts", 0) >= 0 for event in events)
    slices = [event for event in events if event["ph"] == "X" and event["tid"]]
    names = {event["name"] for event in slices}
    assert {"forward", "backward"} <= names | ({"backward"} if "backward, weight gradients" in names else set())
    assert len([event for event in slices if event["name"] == "forward"]) == num_stages * num_microbatches
    begins = {event["id"]: event for event in events if event["ph"] == "s"}
    ends = {event["id"]: event for event in events if event["ph"] == "f"}
    crossings = sum(placement.rank_of(s) != placement.rank_of(s + 1) for s in range(num_stages - 1))
    assert begins.keys() == ends.keys()
    assert len(begins) >= 2 * crossings * num_microbatches - (schedule == "ZBVZeroBubble") * num_microbatches
    for number, begin in begins.items():
        end = ends[number]
        assert end["bp"] == "e"
        assert end["ts"] > begin["ts"]
        sender, receiver = (
            next(each for each in slices if (each["pid"], each["tid"]) == (event["pid"], event["tid"])
                 and each["ts"] <= event["ts"] <= each["ts"] + each["dur"])
            for event in (begin, end)
        )  # fmt: skip
        assert sender["args"]["microbatch"] == receiver["args"]["microbatch"]
        assert abs(sender["args"]["stage"] - receiver["args"]["stage"]) == 1
        assert sender["pid"] != receiver["pid"]


def test_merged_trace_has_what_the_profiler_saw_on_the_same_clock(tmp_path: Path) -> None:
    """Of ranks that are shown, between the arrows of transfers and beside their own processes."""
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    zero_us = 1e9  # of `write_traces`
    (tmp_path / "profile").mkdir()
    for rank in (0, 1, 7):
        with profiled(tmp_path, rank, 3, torch.device("cpu")):
            began_us = time.time() * 1e6
            torch.zeros(3).add(1)
    write_trace(tmp_path, tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    added = [event for event in events if event["name"] == "aten::add"]
    assert len(added) == 2
    assert len({event["pid"] for event in added} - {0, 1}) == 2
    assert abs(added[1]["ts"] + zero_us - began_us) < 60e6
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert {"rank 0", "rank 1", "rank 0: python", "rank 1: python"} <= names


def test_ranks_of_the_pipeline_that_is_shown_have_their_numbers_in_the_job(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    for rank in (1, 0):  # of two replicas: pipeline rank 1 is ranks 2 and 3
        text = trace_path(tmp_path, rank).read_text()
        for replica in (1, 0):
            trace_path(tmp_path, 2 * rank + replica).write_text(text)
    with profiled(tmp_path, 2, 3, torch.device("cpu")):
        torch.zeros(3).add(1)
    write_trace(tmp_path, tmp_path / "merged.json")
    events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"rank 0", "rank 2"} | {name for name in names if name.startswith("rank 2: ")}
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert {*re.findall(r">(rank \d)[<,]", page)} == {"rank 0", "rank 2"}
    assert "<tr><td>1</td><td>2</td>" in page


BASE_NS = {"baseTimeNanoseconds": 2_000_000_000_000}  # after the steps of `write_traces`, which begin at 1,000 s


@pytest.mark.parametrize(
    "document",
    [
        {**BASE_NS, "traceEvents": [3]},
        {**BASE_NS, "traceEvents": {}},
        {**BASE_NS, "traceEvents": [{"name": "process_name", "ph": "M"}]},
        {**BASE_NS, "traceEvents": [{"name": "process_name", "ph": "M", "args": {}}]},
        {**BASE_NS, "traceEvents": [{"name": "a", "ph": "X", "ts": "0"}]},
        {**BASE_NS, "traceEvents": [{"name": "a", "ph": "X"}]},
        {"baseTimeNanoseconds": None, "traceEvents": []},
    ],
)
def test_profile_that_is_none_is_refused(tmp_path: Path, document: object) -> None:
    profile = _traced_with_profile(tmp_path, document)
    with pytest.raises(LogError) as error:
        write_trace(tmp_path, tmp_path / "merged.json")
    assert (error.value.code, error.value.where) == ("log.bad-field", str(profile))


def test_profile_of_a_run_before_is_not_in_the_merged_trace(tmp_path: Path) -> None:
    kernel = {"name": "kernel", "ph": "X", "pid": 5, "tid": 0, "ts": 7.0, "dur": 1.0}
    for base_ns, is_shown in ((BASE_NS["baseTimeNanoseconds"], True), (1_000_000_000, False)):
        _traced_with_profile(tmp_path, {"baseTimeNanoseconds": base_ns, "traceEvents": [kernel]})
        write_trace(tmp_path, tmp_path / "merged.json", force=True)
        events = json.loads((tmp_path / "merged.json").read_text())["traceEvents"]
        assert any(event["name"] == "kernel" for event in events) == is_shown


def _traced_with_profile(log_dir: Path, document: object) -> Path:
    write_metrics(log_dir)
    write_traces(log_dir, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    path = profile_folder(log_dir) / "rank-00000-step-000003.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(document))
    return path


def test_run_without_traces_has_no_merged_trace(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    with pytest.raises(UserError) as error:
        write_trace(tmp_path, tmp_path / "merged.json")
    assert (error.value.code, error.value.where) == ("log.no-trace", str(tmp_path / "trace"))


def test_page_ends_with_what_the_run_is(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    launch = {"argv": ["runner", "launch", "<packed>"], "host": "node-7", "versions": {"torch": "2.13.0"}}
    launch |= {"manifest": {"path": "/packed", "digest": "blake3:12"}, "resolved": {"num_ranks": 4, "lr": 0.5}}
    (tmp_path / "run.json").write_text(json.dumps({"id": "c0ffee", "name": "tiny", "launches": [launch]}))
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    end = page[page.index("<h2>Run</h2>") :]
    assert end.count("<h2>") == 1
    for fact in ("tiny c0ffee", "/packed", "blake3:12", "runner launch &#x27;&lt;packed&gt;&#x27;", "node-7", "4"):
        assert f"<td>{fact}</td>" in end
    assert "torch 2.13.0" in end


@pytest.mark.parametrize(
    ("text", "where", "code"),
    [
        (None, "", "log.unreadable"),
        (b"", "", "log.no-steps"),
        (b'{"eval_loss": 1, "step": 2}\n{\n', ":2", "log.not-json"),
        (b"3\n", ":1", "log.not-an-object"),
        (b"[" * 100_000 + b"\n", ":1", "log.not-json"),
        (b"\xff\n", "", "log.not-utf8"),
        (b'{"step": 1, "loss": 2}\n', ":1: tokens_per_s", "log.bad-field"),
        (b'{"step": "1", "loss": 2, "tokens_per_s": 1}\n', ":1: step", "log.bad-field"),
        (b'{"step": 1, "loss": 1%s, "tokens_per_s": 1}\n' % (b"0" * 400), ":1: loss", "log.bad-field"),
        (b'{"rank": [0], "load_s": 1, "stages": []}\n', ":1: rank", "log.bad-field"),
        (b'{"step": 1, "loss": 2, "tokens_per_s": 1, "step_s": 1, "bubble_s": [1]}\n', ":1", "log.bad-field"),
    ],
)
def test_folder_of_no_run_is_refused(tmp_path: Path, text: bytes | None, where: str, code: str) -> None:
    if text is not None:
        (tmp_path / "metrics.jsonl").write_bytes(text)
    with pytest.raises(InputError) as error:
        read_run(tmp_path)
    assert (error.value.where, error.value.code) == (f"{tmp_path}/metrics.jsonl{where}", code)


def plan_of(log_dir: Path) -> None:
    traces = read_run(log_dir).traces
    assert traces is not None
    traces.planned()


@pytest.mark.parametrize(
    ("before", "after", "code"),
    [
        ('"num_stages": 2', '"num_stages": 0', "log.bad-field"),
        ('"num_stages": 2', '"num_stages": 2000000000', "log.mixed-traces"),
        ('"num_microbatches": 4', '"num_microbatches": 40000000', "log.mixed-traces"),
        ('"kind": "F"', '"kind": "Q"', "log.bad-field"),
        ('"dur"', '"during"', "log.bad-field"),
        ('"tid": 1', '"tid": 7', "log.bad-field"),
        ('"schedule": "1F1B"', '"schedule": "2F2B"', "schedule."),
    ],
)
def test_trace_that_is_not_as_traces_are_is_refused(tmp_path: Path, before: str, after: str, code: str) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    for rank in (0, 1):
        path = trace_path(tmp_path, rank)
        path.write_text(path.read_text().replace(before, after))
    with pytest.raises(UserError) as error:
        plan_of(tmp_path)
    assert error.value.where.startswith(str(tmp_path / "trace"))
    assert error.value.code.startswith(code)


def test_copy_of_a_trace_is_not_that_of_a_rank(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    for copy in ("rank-00000 (1).json", "rank-00001 (1).json"):
        path = trace_path(tmp_path, 0)
        path.with_name(copy).write_bytes(path.read_bytes())
    traces = read_run(tmp_path).traces
    assert traces is not None
    assert traces.ranks == (0, 1)


def test_traces_of_different_runs_are_not_mixed(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    path = trace_path(tmp_path, 1)
    path.write_text(path.read_text().replace('"num_microbatches": 4', '"num_microbatches": 8'))
    with pytest.raises(InputError) as error:
        read_run(tmp_path)
    assert error.value.code == "log.mixed-traces"


def write_lines(log_dir: Path, lines: list[dict[str, object]]) -> None:
    (log_dir / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def attempt(first: int, last: int, loss: float) -> list[dict[str, object]]:
    """Give the lines of two ranks that take these steps, and save after each second one."""
    lines: list[dict[str, object]] = [
        {"rank": rank, "stages": [rank], "load_s": 1.0, "base_nbytes": 100 << 20, "planned_nbytes": 50 << 20}
        for rank in (0, 1)
    ]
    for step in range(first, last + 1):
        times = {"step_s": 1.0, "data_s": [0.1, 0.0], "compute_s": [0.5, 0.4], "communication_s": [0.1, 0.1]}
        lines.append(
            {"step": step, "loss": loss, "tokens_per_s": 1.0, "peak_nbytes": 160 << 20, "bubble_s": [0.2, 0.4], **times}
        )
        if step % 2 == 0:
            lines.append({"step": step, "checkpoint": f"c/step-{step:06d}", "stall_s": 0.1})
    return lines


def test_steps_that_a_later_attempt_has_overtaken_are_forgotten(tmp_path: Path) -> None:
    ended: list[dict[str, object]] = [{"rank": rank, "peak_nbytes": (150 + rank) << 20} for rank in (0, 1)]
    last = attempt(7, 8, 1.0)
    last[1] |= {part: number / 4 for number, part in enumerate(PARTS, 1)}
    write_lines(tmp_path, [*attempt(1, 7, 3.0), *attempt(5, 6, 2.0), *last, *ended])
    run = read_run(tmp_path)
    assert [(line["step"], line["loss"]) for line in run.steps] == [
        (1, 3.0), (2, 3.0), (3, 3.0), (4, 3.0), (5, 2.0), (6, 2.0), (7, 1.0), (8, 1.0),
    ]  # fmt: skip
    assert [line["step"] for line in run.checkpoints] == [2, 4, 6, 8]
    assert run.begins == (1, 5, 7)
    assert run.peaks_nbytes == {0: 150 << 20, 1: 151 << 20}
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert "<td>attempts</td><td>3, from steps 1, 5, 7</td>" in page
    drawn = page[page.index('<svg class="chart"') :]
    assert [drawn.count(f'class="{what}"') for what in ("attempt", "saved", "curve own")] == [2, 4, 2]
    assert "No step was traced" in page
    assert "<td>0</td><td>100.0</td><td>500.0</td><td>100.0</td><td>200.0</td>" in page  # ms: data, compute, …
    assert "<td>1</td><td>1</td><td>100.0</td><td>51.0</td><td>50.0</td><td>1.02</td>" in page  # memory of rank 1
    assert "<td>1</td><td>0.25</td><td>0.50</td><td>0.75</td><td>1.00</td><td>1.25</td><td>1.50</td>" in page  # start


def test_attempt_that_took_no_step_leaves_no_ranks_to_the_next_one(tmp_path: Path) -> None:
    alone: list[dict[str, object]] = [{"rank": rank, "stages": [rank], "load_s": 1.0} for rank in range(4)]
    ended: list[dict[str, object]] = [{"rank": rank, "peak_nbytes": 150 << 20} for rank in (0, 1)]
    write_lines(tmp_path, [*attempt(1, 7, 3.0), *alone, *attempt(7, 8, 1.0), *ended])
    assert [line["rank"] for line in read_run(tmp_path).loads] == [0, 1]


def test_run_that_was_killed_is_drawn_as_far_as_it_came(tmp_path: Path) -> None:
    write_lines(tmp_path, [*attempt(1, 9, 3.0), *attempt(1, 3, 2.0)])
    with open(tmp_path / "metrics.jsonl", "a") as stream:
        stream.write('{"step": 4, "lo')
    said = write_report(tmp_path, tmp_path / "report.html")
    assert said == "3 steps, loss 2.0000 to 2.0000; 1 tokens/s; bubble 30.0% of a step"
    page = (tmp_path / "report.html").read_text()
    assert "<td>0</td><td>0</td><td>100.0</td><td>60.0</td><td>50.0</td><td>1.20</td>" in page  # the peak so far
    assert "<td>1</td><td>1</td><td>100.0</td><td></td><td>50.0</td><td></td>" in page
    assert "The run did not finish" in page


def test_run_is_drawn_without_its_pipeline_while_a_rank_has_no_trace(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    trace_path(tmp_path, 1).unlink()
    write_report(tmp_path, tmp_path / "report.html")
    page = (tmp_path / "report.html").read_text()
    assert [page.count(f'<svg class="{what}"') for what in ("chart", "pipeline")] == [2, 0]
    with pytest.raises(LogError) as error:
        write_trace(tmp_path, tmp_path / "merged.json")
    assert error.value.code == "log.no-trace"


def test_steps_that_not_every_rank_has_traced_are_left_out(tmp_path: Path) -> None:
    write_metrics(tmp_path)
    write_traces(tmp_path, "1F1B", Placement(num_stages=2, num_ranks=2, style="loop"), 4)
    path = trace_path(tmp_path, 0)
    document = json.loads(path.read_text())
    later = [{**event, "args": {**event["args"], "step": 4}} for event in document["traceEvents"]]
    path.write_text(json.dumps({**document, "traceEvents": document["traceEvents"] + later}))
    traces = read_run(tmp_path).traces
    assert traces is not None
    assert [step.step for step in traces.steps] == [3]
    path.write_text(json.dumps({**document, "traceEvents": later}))
    assert read_run(tmp_path).traces is None


# The load of experts, drawn from numbers that are known.


def test_nothing_is_drawn_of_a_run_that_counted_nothing() -> None:
    assert draw_load([{"step": 1, "loss": 1.0}, {"step": 2, "expert_load": {}}]) == []


def test_an_expert_has_a_cell_as_dark_as_its_share_of_the_mean() -> None:
    early = [{"step": step, "expert_load": {"3": [0, 0, 8], "11": [1, 1, 1]}} for step in range(1, 19)]
    late = [{"step": step, "expert_load": {"3": [4, 1, 1], "11": [1, 0, 1]}} for step in (19, 20)]
    _, picture, note = draw_load([*early, *late])
    cells = [
        (cell.findtext("title"), cell.get("fill-opacity")) for cell in ElementTree.fromstring(picture).iter("rect")
    ]
    assert cells == [
        ("layer 3, expert 0: 2.00 of the mean", "1.00"),
        ("layer 3, expert 1: 0.50 of the mean", "0.25"),
        ("layer 3, expert 2: 0.50 of the mean", "0.25"),
        ("layer 11, expert 0: 1.50 of the mean", "0.75"),
        ("layer 11, expert 1: 0.00 of the mean", "0.00"),
        ("layer 11, expert 2: 1.50 of the mean", "0.75"),
    ]
    names = [text.text for text in ElementTree.fromstring(picture).iter("text")]
    assert names == ["layer 3", "11", "expert 0", "1", "2"]
    assert "steps 19 to 20" in note
    assert "2.00 of the mean, in layer 3" in note


@pytest.mark.parametrize("load", [[1, 2], {"a": [1]}, {"1": [-1]}, {"1": 3}])
def test_a_load_that_is_not_counts_by_layer_is_refused(load: object) -> None:
    line = {"step": 1, "loss": 1.0, "tokens_per_s": 1.0}
    check_line({**line, "expert_load": {"1": [2, 3]}}, "metrics.jsonl:1")
    with pytest.raises(UserError) as error:
        check_line({**line, "expert_load": load}, "metrics.jsonl:1")
    assert (error.value.code, error.value.where) == ("log.bad-field", "metrics.jsonl:1: expert_load")
