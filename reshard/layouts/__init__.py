"""Layouts: which stage has which modules. Reads every spelling into one form, balances, and prints."""

from reshard.layouts.model import StageLayout
from reshard.layouts.spelling import parse_layout

__all__ = ["StageLayout", "parse_layout"]
