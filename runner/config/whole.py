"""Whole numbers on the command line, bounded: no memory, table or clock has room for more."""

from __future__ import annotations

from typing import Any

import click

__all__ = ["MOST", "Whole"]

MOST = (1 << 31) - 1


class Whole(click.IntRange):
    """An integer from `min` to `MOST`. Help shows the lower bound alone."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        found = int(super().convert(value, param, ctx))
        if found > MOST:
            self.fail(f"expected at most {MOST}, found {str(value)[:40]}", param, ctx)
        return found
