"""Which collectives of experts each action of a schedule runs; ranks of a stage run the same, in the same order."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest

from manifests.schedules.actions import actions_of
from manifests.schema import Manifest
from runner.pipeline.timetable import find_timetable
from stores.open import open_manifest
from tests.builders import pack
from tests.fast.manifests.models.catalogued import save_tiny
from tests.process.runner.parallel.parallel_cases import VOCAB_SIZE
from tests.process.torchrun import launch

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LAYOUTS = {
    "1F1B": "pp=2",
    "InterleavedZeroBubble": "pp=2,vpp=2",
    "ZBVZeroBubble": "pp=2,vpp=2,style=v",
    "DualPipeV": "pp=2,vpp=2,style=v",
}
CASES = tuple((schedule, ac) for schedule in LAYOUTS for ac in ("none", "full"))
NUM_MICROBATCHES = 4
# All-to-alls of a layer: counts, tokens there and back; the backward of the latter two.
FORWARD, BACKWARD = 3, 2
ARGS = (
    *("--no-self-check", "--dp-shard", "2", "--ep", "2"),
    *("--seq-len", "32", "--global-batch", "8", "--microbatch", "1"),
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("collectives")
    save_tiny(place / "model", "Qwen3MoeForCausalLM", vocab_size=VOCAB_SIZE, num_hidden_layers=4)
    for layout in set(LAYOUTS.values()):
        pack(place / "model", place / layout, layout)
    jobs = [
        {"name": f"{schedule}-{ac}", "root": str(place / LAYOUTS[schedule]),
         "args": [*ARGS, "--schedule", schedule, "--ac", ac]}
        for schedule, ac in CASES
    ]  # fmt: skip
    (place / "cases.json").write_text(json.dumps(jobs))
    launch(4, "runner/parallel/collectives_worker.py", place / "cases.json", place, timeout_s=400)
    return place


def calls_of(place: Path, name: str, rank: int) -> list[tuple[int, str, int]]:
    return [tuple(call) for call in json.loads((place / f"{name}-{rank}.json").read_text())]


def expected_calls(manifest: Manifest, schedule: str, ac: str, rank: int) -> Counter[tuple[int, str, int]]:
    """Return how often each action of a pipeline rank's schedule runs an all-to-all."""
    expected = Counter[tuple[int, str, int]]()
    num_layers = [sum(".layers." in module for module in stage.modules) for stage in manifest.stages]
    again = FORWARD if ac == "full" else 0  # the backward runs the forward once more
    table = find_timetable(schedule, manifest.placement, NUM_MICROBATCHES).planned(NUM_MICROBATCHES)
    for action in (action for step in table.ranks[rank] for action in actions_of(step)):
        # The first stage runs all of its backward in W: torch leaves it nothing for I.
        has_backward = action.kind == "B" or action.kind == ("W" if action.stage == 0 else "I")
        count = FORWARD if action.kind == "F" else BACKWARD + again if has_backward else 0
        expected[action.stage, action.kind, action.microbatch] += count * num_layers[action.stage]
    return +expected


@pytest.mark.parametrize(("schedule", "ac"), CASES)
def test_actions_run_the_collectives_of_their_layers_in_the_same_order_on_all_ranks_of_a_stage(
    schedule: str, ac: str, place: Path
) -> None:
    manifest = open_manifest(place / LAYOUTS[schedule]).manifest
    kinds = set[str]()
    for rank in range(manifest.placement.num_ranks):
        first, second = (calls_of(place, f"{schedule}-{ac}", 2 * rank + number) for number in range(2))
        assert first == second
        assert Counter(first) == expected_calls(manifest, schedule, ac, rank)
        kinds |= {kind for _, kind, _ in first}
    assert ("I" in kinds) == (schedule != "1F1B")
