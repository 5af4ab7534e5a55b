"""A user error keeps what it carries on its way from a rank to the person who reads it."""

from __future__ import annotations

import json
import pickle

import pytest

from manifests.errors import InputError, RankError, SourceError, UnreachableError, UsageError, UserError, error_json

KINDS = (UserError, UsageError, InputError, SourceError, UnreachableError, RankError)


@pytest.mark.parametrize("kind", KINDS)
def test_error_seen_from_further_out_keeps_every_attribute_but_its_place(kind: type[UserError]) -> None:
    error = kind("a.json", "is empty", "download it again", code="source.empty")
    error.is_elsewhere, error.exit_code = True, 7
    seen = error.within("rank 2")
    assert (type(seen), seen.where) == (kind, "rank 2: a.json")
    assert {**vars(seen), "where": "a.json"} == vars(error)
    assert error.where == "a.json"


@pytest.mark.parametrize("kind", KINDS)
def test_error_sent_between_processes_arrives_as_it_was(kind: type[UserError]) -> None:
    error = kind("a.json", "is empty", "download it again", code="source.empty")
    error.is_elsewhere, error.exit_code = True, 7
    received = pickle.loads(pickle.dumps(error))
    assert (type(received), vars(received)) == (kind, vars(error))


def test_json_form_carries_the_code() -> None:
    error = InputError("a.json", "is empty", code="source.empty")
    assert json.loads(error_json(error)) == {
        "version": 1,
        "error": {"code": "source.empty", "where": "a.json", "problem": "is empty", "hint": ""},
    }
