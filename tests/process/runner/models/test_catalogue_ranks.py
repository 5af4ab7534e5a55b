"""The catalogue is what `make catalogue` writes: two ranks have compared each architecture with its whole model."""

from __future__ import annotations

import pytest

from tests.fast.manifests.models.catalogued import DOZEN, check_table
from tests.process.torchrun import fork_context


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("architectures", [DOZEN[:1], ()], ids=["some", "all"])
def test_catalogue_is_what_the_command_writes(architectures: tuple[str, ...]) -> None:
    from tools import catalogue

    fork_context()  # whose process has imported what ranks need
    assert check_table(catalogue.main, *architectures) == 0
