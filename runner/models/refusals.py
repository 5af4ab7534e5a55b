"""What transformers says of a config that it takes for no model, as an error of the config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version

from huggingface_hub.errors import StrictDataclassError

from manifests.errors import ModelError


@contextmanager
def refusals(where: str) -> Iterator[None]:
    """Run a block in which transformers reads a config; `where` is the config's name.

    Raises:
        ModelError: transformers refuses it.
    """
    try:
        yield
    except (StrictDataclassError, AssertionError, AttributeError, KeyError, TypeError, ValueError) as error:
        said = " ".join(str(error).split())
        raise ModelError(
            where,
            f"transformers {version('transformers')} refuses it: {said}",
            code="config.refused-by-transformers",
        ) from error
