"""The load of experts, drawn from numbers that are known."""

from __future__ import annotations

from xml.etree import ElementTree

import pytest

from manifests.errors import UserError
from runner.report.charts import draw_load
from runner.report.read import check_line


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
