"""Errors with the flags of reshard."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from manifests.errors import naming_flags
from reshard.cli.command import cli
from reshard.cli.options import flag_of


@pytest.fixture(autouse=True)
def flags_in_errors() -> Iterator[None]:
    with naming_flags(partial(flag_of, cli.import_verbs())):
        yield
