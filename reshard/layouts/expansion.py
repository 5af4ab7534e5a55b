"""Expands a Megatron layout string: repeats written out, and the position in the spec of every letter.

Source: NVIDIA/Megatron-LM d98e8a64, `megatron/core/transformer/pipeline_parallel_layer_layout.py`,
`parse_str_to_list`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from manifests.errors import LayoutError
from reshard.layouts.errors import error_at

LETTERS = "EtmL"
MAX_LETTERS = 16384  # bars included; more stages and layers than any model has

# Megatron's two passes, in order: (body)*n, then x*n.
PASSES = (re.compile(r"\(([^)]+)\)\*(\d+)"), re.compile(r"(.)\*(\d+)"))
LEGAL = frozenset(LETTERS + "|")
CASES = {"e": "E", "T": "t", "M": "m", "l": "L"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Expansion:
    """`text` has only layer letters and bars; `text[i]` is at `origins[i]` in the spec."""

    text: str
    origins: list[int]


def expand(spec: str, strict: bool) -> Expansion:
    """Expand a layout string.

    What Megatron accepts has the same meaning here. Beyond that, unless `strict`, white space is skipped
    and groups nest.

    Raises:
        LayoutError: an unknown letter, a group without a repeat, a bad or huge repeat.
    """
    theirs = _expand_as_megatron(spec)
    if LEGAL.issuperset(theirs.text):
        return theirs
    ours = _Reader(spec).read()
    if not strict:
        return ours
    space = next((at for at, letter in enumerate(spec) if letter.isspace()), None)
    if space is not None:
        raise error_at(
            spec,
            space,
            "Megatron does not accept white space",
            f"write {''.join(spec.split())}",
            code="layout.not-megatron",
        )
    raise error_at(
        spec,
        _nested_group(spec),
        "Megatron does not accept nested groups",
        "write out the inner group",
        code="layout.not-megatron",
    )


def _expand_as_megatron(spec: str) -> Expansion:
    """Expand as Megatron does: drop the commas, then one pass for groups and one for characters."""
    origins = [at for at, letter in enumerate(spec) if letter != ","]
    text = spec.replace(",", "")
    if "*" not in text:
        return Expansion(text=text, origins=origins)
    for pattern in PASSES:
        done, pieces, places = 0, [], []
        num_letters = len(text)
        for found in pattern.finditer(text):
            times = _times(found[2], spec, origins[found.start(2)])
            num_letters += len(found[1]) * times - len(found[0])
            _check_length(num_letters, spec, origins[found.start(2)])
            pieces += [text[done : found.start()], found[1] * times]
            places += origins[done : found.start()]
            places += origins[found.start(1) : found.end(1)] * times
            done = found.end()
        text, origins = "".join(pieces) + text[done:], places + origins[done:]
    return Expansion(text=text, origins=origins)


class _Reader:
    """Reads the extended grammar: letters, bars, nested groups, repeats of either, white space between them."""

    def __init__(self, spec: str) -> None:
        self.spec = spec
        self.tokens = [(letter, at) for at, letter in enumerate(spec) if letter != ","]
        self.next = 0
        # Open groups, the whole layout first: start, letters and their origins.
        self.open: list[tuple[int, list[str], list[int]]] = [(0, [], [])]

    def read(self) -> Expansion:
        while (token := self._take()) is not None:
            letter, at = token
            if letter in LEGAL:
                self._append([letter], [at])
            elif letter == "(":
                self.open.append((at, [], []))
            elif letter == ")":
                self._close(at)
            else:
                raise self._refusal(letter, at)
        if len(self.open) > 1:
            raise error_at(self.spec, self.open[-1][0], "unclosed group", "close it with )*n", code="layout.bad-group")
        _, letters, origins = self.open[0]
        return Expansion(text="".join(letters), origins=origins)

    def _take(self) -> tuple[str, int] | None:
        self._skip_space()
        if self.next == len(self.tokens):
            return None
        self.next += 1
        return self.tokens[self.next - 1]

    def _skip_space(self) -> None:
        while self.next < len(self.tokens) and self.tokens[self.next][0].isspace():
            self.next += 1

    def _peek(self) -> str:
        self._skip_space()
        return self.tokens[self.next][0] if self.next < len(self.tokens) else ""

    def _close(self, at: int) -> None:
        if len(self.open) == 1:
            raise error_at(self.spec, at, "unmatched )", code="layout.bad-group")
        opened, letters, origins = self.open.pop()
        if self._peek() != "*":
            raise error_at(
                self.spec,
                opened,
                "expected *n after the group",
                "write (…)*n, or remove the parentheses",
                code="layout.bad-group",
            )
        if not letters and self.spec[opened + 1 : at].strip(", ") == "":
            raise error_at(self.spec, opened, "empty group", code="layout.bad-group")
        self._append(letters, origins)

    def _append(self, letters: list[str], origins: list[int]) -> None:
        """Add letters, repeated if a repeat follows, to the innermost open group."""
        times, at = self._repeat()
        _, into, places = self.open[-1]
        _check_length(len(letters) * times + sum(len(group[1]) for group in self.open), self.spec, at)
        into += letters * times
        places += origins * times

    def _repeat(self) -> tuple[int, int]:
        """Read `*n` if it is next; return n and its position."""
        if self._peek() != "*":
            return 1, self.tokens[self.next - 1][1]
        star = self.tokens[self.next][1]
        self.next += 1
        self._skip_space()
        digits = []
        while self.next < len(self.tokens) and self.tokens[self.next][0].isdecimal():
            digits.append(self.tokens[self.next])
            self.next += 1
        if not digits:
            raise error_at(self.spec, star, "expected a number after *", code="layout.bad-repeat")
        if self._peek() == "*":
            at = self.tokens[self.next][1]
            raise error_at(
                self.spec, at, "a repeat cannot be repeated", "use a group: (t*2)*3", code="layout.bad-repeat"
            )
        return _times("".join(digit for digit, _ in digits), self.spec, digits[0][1]), digits[0][1]

    def _refusal(self, letter: str, at: int) -> LayoutError:
        if letter == "*":
            return error_at(self.spec, at, "expected a letter or group before *", code="layout.bad-repeat")
        if letter.isdecimal():
            count = self.spec.strip()
            hint = f"write pp={count} for {count} stages" if count.isdecimal() else "write t*3 for three layers"
            return error_at(self.spec, at, "expected a letter, found a number", hint, code="layout.bad-repeat")
        hint = "E embedding, t decoder layer, m MTP layer, L norm and head, | next stage"
        if letter in CASES:
            hint = f"did you mean {CASES[letter]}? {hint}"
        return error_at(self.spec, at, f"unknown layer letter {letter!r}", hint, code="layout.unknown-letter")


def _times(digits: str, spec: str, at: int) -> int:
    digits = digits.lstrip("0")
    if len(digits) > 9:
        raise _too_long(spec, at)
    return int(digits or "0")


def _check_length(num_letters: int, spec: str, at: int) -> None:
    if num_letters > MAX_LETTERS:
        raise _too_long(spec, at)


def _too_long(spec: str, at: int) -> LayoutError:
    return error_at(spec, at, f"expected at most {MAX_LETTERS} letters after repeats", code="layout.too-long")


def _nested_group(spec: str) -> int:
    """Return the position of the first group inside another."""
    depth = 0
    for at, letter in enumerate(spec):
        depth += (letter == "(") - (letter == ")")
        if depth == 2:
            return at
    return 0
