"""The HTTP client of huggingface_hub during uploads: requests that stall time out, and logs show no signatures."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from huggingface_hub import get_session
from huggingface_hub.utils import _http

from stores.address import without_queries

_CONNECT_S = 30.0


@contextmanager
def uploading(idle_s: float) -> Iterator[None]:
    """Let requests time out that send and receive no byte for `idle_s`, until the block ends; and strip logged URLs.

    huggingface_hub uploads without timeouts. Those that a client of the user's has are kept.
    """
    _limit(get_session(), idle_s)  # for good: another thread may be uploading with it
    strip, logger = _StripQueries(), logging.getLogger(_http.__name__)
    chosen = getattr(_http, "_GLOBAL_CLIENT_FACTORY", None)
    # After a failure to connect, huggingface_hub makes a new client.
    limiting = None if chosen is None or isinstance(chosen, _Limiting) else _Limiting(chosen, idle_s)
    logger.addFilter(strip)
    if limiting is not None:
        _http._GLOBAL_CLIENT_FACTORY = limiting
    try:
        yield
    finally:
        logger.removeFilter(strip)
        if limiting is not None and _http._GLOBAL_CLIENT_FACTORY is limiting:
            _http._GLOBAL_CLIENT_FACTORY = limiting.factory


@dataclass(frozen=True, slots=True)
class _Limiting:
    """A factory of clients that time out."""

    factory: Callable[[], Any]
    idle_s: float

    def __call__(self) -> Any:
        client = self.factory()
        _limit(client, self.idle_s)
        return client


class _StripQueries(logging.Filter):
    """Strip URLs of their queries: whoever has the signature in them may write there."""

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = without_queries(record.getMessage()), None
        return True


def _limit(client: Any, idle_s: float) -> None:
    timeout, connect_s = client.timeout, min(idle_s, _CONNECT_S)
    limits = ((timeout.connect, connect_s), (timeout.read, idle_s), (timeout.write, idle_s))
    client.timeout = (*(limit_s if set_s is None else set_s for set_s, limit_s in limits), timeout.pool)
