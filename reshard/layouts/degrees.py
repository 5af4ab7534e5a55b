"""The `key=value` words of a spec, and the parallel degrees that they set."""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass

from manifests.errors import InputError, LayoutError, Parameter, UsageError
from manifests.placement import Placement, Style
from manifests.schedules.rules import SINGLE_STAGE_SCHEDULES
from reshard.formatting import counted, did_you_mean, list_words, shorten
from reshard.layouts.model import MAX_STAGES, SCHEDULES, Request, StageLayout, cut_modules, error_at

MOST_COUNT = 100_000  # of stages, ranks or layers: more than any pipeline has
DEGREES = ("pp", "vpp", "style", "schedule")  # accepted by every spelling except Megatron's


@dataclass(frozen=True, kw_only=True, slots=True)
class Word:
    """One comma-separated word of a spec: `pp=4` has key `pp`; a word without `=` has no key."""

    key: str
    value: str
    position: int  # of the first character that is not white space
    value_position: int


def read_words(spec: str) -> tuple[Word, ...]:
    words, start = [], 0
    for part in spec.split(","):
        key, equals, value = part.partition("=") if "=" in part else ("", "", part)
        words.append(
            Word(
                key=key.strip(),
                value=value.strip(),
                position=start + _indent(part),
                value_position=start + len(key) + len(equals) + _indent(value),
            )
        )
        start += len(part) + 1
    return tuple(words)


class Options:
    """Reads the words of a spec; errors point at them."""

    def __init__(self, request: Request, words: Collection[Word], choices: Collection[str]) -> None:
        self.request = request
        self._table: dict[str, Word] = {}
        for word in words:
            self._check(word, choices)
            self._table[word.key] = word

    def __contains__(self, key: str) -> bool:
        return key in self._table

    def error(self, key: str, problem: str, hint: str = "", *, code: str) -> InputError:
        """Return an error that points at the word with that key, or at the start if it is absent."""
        word = self._table.get(key)
        return error_at(self.request.spec, word.position if word else 0, problem, hint, code=code)

    def text(self, key: str) -> str | None:
        """Return the value as written; None if the key is absent."""
        word = self._table.get(key)
        return word.value if word else None

    def count(self, key: str, least: int = 1) -> int | None:
        """Return a whole number from `least` to `MOST_COUNT`; None if the key is absent."""
        text = self.text(key)
        if text is None:
            return None
        if not re.fullmatch(r"[0-9]{1,9}", text) or int(text) < least:
            raise self.error(
                key, f"expected a whole number, {least} or more, found {shorten(text)!r}", code="layout.bad-option"
            )
        if int(text) > MOST_COUNT:
            raise self.error(key, f"expected at most {MOST_COUNT}, found {text}", code="layout.bad-option")
        return int(text)

    def choice(self, key: str, choices: Collection[str]) -> str | None:
        """Return one of the known words, ignoring case; None if the key is absent."""
        text = self.text(key)
        if text is None:
            return None
        for word in choices:
            if word.lower() == text.lower():
                return word
        raise self.error(
            key,
            f"expected {list_words(choices)}, found {shorten(text)!r}",
            did_you_mean(text, choices),
            code="layout.bad-option",
        )

    def _check(self, word: Word, choices: Collection[str]) -> None:
        spec = self.request.spec
        if not word.key:
            raise error_at(
                spec,
                word.position,
                f"expected key=value, found {shorten(word.value)!r}",
                f"known keys: {list_words(choices, 'and')}",
                code="layout.bad-option",
            )
        if word.key not in choices:
            hint = did_you_mean(word.key, choices) or f"known keys: {list_words(choices, 'and')}"
            if flag := _FLAGS.get(word.key):
                hint = f"{flag} is a flag of reshard plan, and of training: runner launch MANIFEST -- {flag} …"
            raise error_at(spec, word.position, f"unknown key {shorten(word.key)!r}", hint, code="layout.unknown-key")
        if word.key in self._table:
            raise error_at(spec, word.position, f"{word.key} is given twice", code="layout.repeated-key")


@dataclass(frozen=True, kw_only=True, slots=True)
class Degrees:
    """The number of ranks and stages, as far as given; the rest is derived."""

    num_ranks: int | None
    num_virtual: int | None = None
    style: Style | None = None
    schedule: str | None = None

    @classmethod
    def read(cls, options: Options) -> Degrees:
        schedule, style = options.choice("schedule", SCHEDULES), options.choice("style", ("loop", "v"))
        num_ranks = agreed_ranks(options.count("pp"), options.request)
        return cls.of(num_ranks=num_ranks, num_virtual=options.count("vpp"), style=style, schedule=schedule)

    @classmethod
    def of(
        cls, *, num_ranks: int | None, num_virtual: int | None = None, style: str | None, schedule: str | None
    ) -> Degrees:
        """Return degrees as given; a v schedule implies style v, and no other a style."""
        given: Style | None = "v" if style == "v" or (style is None and SCHEDULES.get(schedule or "") == "v") else None
        return cls(num_ranks=num_ranks, num_virtual=num_virtual, style=given, schedule=schedule)

    def placement(self, request: Request, num_stages: int | None = None) -> Placement:
        """Return the placement of stages on ranks. Without `num_stages` there are pp x vpp.

        Without vpp, schedules of several stages per rank have two, as torchtitan's do.
        """
        num_virtual = self.num_virtual or (2 if self.style == "v" else None)
        if num_stages is None:
            if self.num_ranks is None:
                raise error_at(
                    request.spec,
                    len(request.spec),
                    "expected pp, the number of pipeline ranks",
                    "add pp=N",
                    code="layout.no-ranks",
                )
            is_interleaved = self.num_ranks > 1 and self.schedule not in (None, *SINGLE_STAGE_SCHEDULES)
            num_stages = self.num_ranks * (num_virtual or 1 + is_interleaved)
        _check_num_stages(request, num_stages)
        num_ranks = self.num_ranks or max(1, num_stages // (num_virtual or 1))
        self._check(request, num_stages, num_ranks)
        return Placement(num_stages=num_stages, num_ranks=num_ranks, style=self.style or "loop")

    def _check(self, request: Request, num_stages: int, num_ranks: int) -> None:
        spec = shorten(request.spec)
        if num_stages % num_ranks:
            raise LayoutError(
                "layout",
                f"{spec} has {counted(num_stages, 'stage')}, not a multiple of {counted(num_ranks, 'rank')}",
                f"use PP {_nearest_divisors(num_stages, num_ranks)}",
                code="layout.indivisible-stages",
            )
        num_virtual = num_stages // num_ranks
        if self.num_virtual not in (None, num_virtual):
            raise LayoutError(
                "layout",
                f"{spec} has {counted(num_virtual, 'stage')} per rank, but vpp={self.num_virtual}",
                f"set vpp={num_virtual}, or remove it",
                code="layout.conflicting-degrees",
            )
        if self.style == "v" and num_virtual != 2:
            raise LayoutError(
                "layout",
                f"style v needs 2 stages per rank, {spec} has {num_virtual}",
                f"use {2 * num_ranks} stages, or style=loop",
                code="layout.conflicting-degrees",
            )
        self._check_schedule(spec, num_virtual)

    def _check_schedule(self, spec: str, num_virtual: int) -> None:
        if self.schedule is None:
            return
        if SCHEDULES[self.schedule] != (self.style or "loop"):
            raise LayoutError(
                "layout",
                f"{self.schedule} needs style {SCHEDULES[self.schedule]}, {spec} has style {self.style or 'loop'}",
                f"set style={SCHEDULES[self.schedule]}",
                code="layout.schedule-mismatch",
            )
        if self.schedule in SINGLE_STAGE_SCHEDULES and num_virtual != 1:
            raise LayoutError(
                "layout",
                f"{self.schedule} needs 1 stage per rank, {spec} has {num_virtual}",
                "use schedule=Interleaved1F1B, or remove vpp",
                code="layout.schedule-mismatch",
            )


def layout_of(request: Request, bounds: Collection[int], degrees: Degrees) -> StageLayout:
    """Return the layout whose stages are between `bounds`."""
    stages = cut_modules(request.inventory.modules, tuple(bounds))
    placement = degrees.placement(request, len(stages))
    return StageLayout(spec=request.spec, stages=stages, placement=placement, schedule=degrees.schedule)


def agreed_ranks(num_ranks: int | None, request: Request) -> int | None:
    """Return the number of ranks of the spec or the caller; an error if they differ."""
    if num_ranks and request.num_ranks and num_ranks != request.num_ranks:
        raise UsageError(
            Parameter("pp"),
            f"{counted(request.num_ranks, 'rank')} requested, {shorten(request.spec)} has {num_ranks}",
            "remove one of the two",
            code="layout.conflicting-degrees",
        )
    return num_ranks or request.num_ranks


def _check_num_stages(request: Request, num_stages: int) -> None:
    """Raise if there are more stages than any pipeline has, before building anything per stage."""
    if num_stages > MAX_STAGES:
        raise LayoutError(
            "layout",
            f"expected at most {MAX_STAGES} stages, {shorten(request.spec)} has {num_stages}",
            "use fewer stages",
            code="layout.too-many-stages",
        )


def _nearest_divisors(number: int, wanted: int) -> str:
    """Return up to three divisors of `number` nearest to `wanted`: `8, 16 or 32`."""
    divisors = [value for value in range(1, number + 1) if number % value == 0]
    return list_words(sorted(sorted(divisors, key=lambda value: (abs(value - wanted), value))[:3]))


def _indent(text: str) -> int:
    return len(text) - len(text.lstrip())


_FLAGS = {"tp": "--tp", "cp": "--cp", "ep": "--ep", "dp": "--dp-replicate", "fsdp": "--dp-shard"}
