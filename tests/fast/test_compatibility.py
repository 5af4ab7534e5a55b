"""docs/compatibility.md is what was recorded, and what was recorded is what the runner says was tested."""

from __future__ import annotations

import re
import tomllib

from packaging.requirements import Requirement

from runner.preflight.preflight import LEAST, TESTED
from tools import compatibility

PROJECT = tomllib.loads((compatibility.ROOT / "pyproject.toml").read_text())["project"]


def test_releases_that_messages_name_are_the_locked_one_and_those_whose_training_was_compared_with_references() -> None:
    locked = re.search(r"^torch==(.+)$", (compatibility.ROOT / "constraints.txt").read_text(), re.MULTILINE)
    assert locked is not None
    compared = [run for run in compatibility.recorded() if run["suites"].keys() >= {"logits", "parity", "ties"}]
    assert {locked[1], *(run["versions"]["torch"].split("+")[0] for run in compared)} == set(TESTED)


def test_suites_are_recorded_without_a_failure() -> None:
    runs = compatibility.recorded()
    assert [suite for run in runs for suite in run["suites"].values() if suite["failed"] or not suite["passed"]] == []
    assert {suite for run in runs for suite in run["suites"]} <= compatibility.SUITES.keys()


def test_recorded_versions_are_those_that_the_package_asks_for() -> None:
    asked = {
        requirement.name: requirement.specifier
        for requirement in map(Requirement, PROJECT["optional-dependencies"]["runner"])
    }
    for run in compatibility.recorded():
        for name, version in run["versions"].items():
            assert version is None or name not in asked or asked[name].contains(version.split("+")[0]), (name, version)
    assert f">={LEAST[0]}.{LEAST[1]}" in str(asked["torch"])
    newest = max(tuple(map(int, release.split(".")[:2])) for release in TESTED)
    assert f"<{newest[0]}.{newest[1] + 1}" in str(asked["torch"])


def test_page_names_every_run() -> None:
    rows = dict(re.findall(r"^\| (\w+) \| (.+) \|$", compatibility.PAGE.read_text(), re.MULTILINE))
    versions = [run["versions"] for run in compatibility.recorded()]
    assert rows["torch"] == " | ".join(found["torch"] for found in versions)
    assert rows["torchtitan"] == " | ".join(found["torchtitan"] or "-" for found in versions)
