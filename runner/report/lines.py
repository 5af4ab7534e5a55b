"""Check the lines and traces of a run field by field, so that a report can rely on them. No torch."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from manifests.errors import LogError, refused_by_system
from manifests.jsontext import kind_of

Line = Mapping[str, Any]
_MOST = 1 << 62
_MEASURED = ("data_s", "compute_s")
_SIMULATED = ("communication_s", "bubble_s")  # in some steps of a large schedule
_KINDS = "FBIWL"


def read_text(path: Path, hint: str = "") -> str:
    """Read a text file.

    Raises:
        InputError: it cannot be read, or is not UTF-8.
    """
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise refused_by_system(str(path), error, hint=hint, code="log.unreadable") from error
    except UnicodeDecodeError as error:
        raise LogError(str(path), f"is not UTF-8: {error.reason}", hint, code="log.not-utf8") from error


def read_object(text: str, where: str) -> Line:
    """Parse a JSON object, which may contain NaN and infinity.

    Raises:
        LogError: it is not one.
    """
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LogError(where, f"is not JSON: {error}", code="log.not-json") from error
    if not isinstance(document, dict):
        raise LogError(where, f"expected an object, found {kind_of(document)}", code="log.not-an-object")
    return document


def check_line(line: Line, where: str) -> None:
    """Check that a line of metrics.jsonl has the required fields of its kind, with the right types.

    Raises:
        LogError: naming the field.
    """
    for name, needed in _NEEDED.items():
        if name in line:
            _check_fields(line, where, needed if "save_error" not in line else ())
            break
    _check_fields(line, where, ())
    names = [name for name in (*_MEASURED, *_SIMULATED) if name in line]
    is_complete = "step_s" in line and names in ([*_MEASURED], [*_MEASURED, *_SIMULATED])
    if names and (not is_complete or len({len(line[name]) for name in names}) > 1):
        expected = f"{' and '.join(_MEASURED)}, and {' and '.join(_SIMULATED)} or neither"
        problem = f"expected step_s, {expected}, of the same pipeline ranks"
        raise LogError(where, problem, code="log.bad-field")


def check_types(line: Line, where: str) -> None:
    """Check the types of the fields of a line of metrics.jsonl.

    Raises:
        LogError: naming the field.
    """
    _check_fields(line, where, ())


def check_run(run: object, where: str) -> Line:
    """Check the description of the run in a trace.

    Raises:
        LogError: naming the field.
    """
    if not isinstance(run, Mapping):
        raise LogError(f"{where}: run", f"expected an object, found {kind_of(run)}", code="log.bad-field")
    _check_fields(run, f"{where}: run", ("schedule", "num_stages", "num_ranks", "style", "num_microbatches"))
    return run


def check_events(document: Line, run: Line, where: str) -> tuple[Line, ...]:
    """Return the actions of a rank on its stages, from its trace.

    Raises:
        LogError: naming the bad field.
    """
    events = document.get("traceEvents")
    if not isinstance(events, list):
        raise LogError(f"{where}: traceEvents", f"expected a list, found {kind_of(events)}", code="log.bad-field")
    checked = []
    for number, event in enumerate(events):
        at = f"{where}: traceEvents[{number}]"
        if not isinstance(event, Mapping):
            raise LogError(at, f"expected an object, found {kind_of(event)}", code="log.bad-field")
        if event.get("ph") != "X":
            continue
        _check_fields(event, at, ("ts", "dur", "tid", "args"))
        if event["tid"] < 0:  # a transfer
            continue
        _check_fields(event["args"], f"{at}.args", ("step", "kind", "microbatch"))
        if event["tid"] >= run["num_stages"]:
            problem = f"expected a stage below {run['num_stages']}, found {event['tid']}"
            raise LogError(f"{at}.tid", problem, code="log.bad-field")
        checked.append(event)
    return tuple(checked)


def _check_fields(line: Line, where: str, needed: Iterable[str]) -> None:
    for name in needed:
        if name not in line:
            raise LogError(f"{where}: {name}", "is missing", code="log.bad-field")
    for name, value in line.items():
        expected, is_one = _FIELDS.get(name, _ANY)
        if not is_one(value):
            shown = repr(value)[:80] if isinstance(value, int | float | str) else kind_of(value)
            raise LogError(f"{where}: {name}", f"expected {expected}, found {shown}", code="log.bad-field")


def _is_integer(value: object) -> bool:
    return type(value) is int and abs(value) < _MOST


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MOST


def _is_positive(value: object) -> bool:
    return _is_count(value) and value != 0


def _is_number(value: object) -> bool:
    return type(value) is float or _is_integer(value)


def _is_finite(value: object) -> bool:
    return _is_number(value) and abs(value) < _MOST  # type: ignore[arg-type]


def _is_duration(value: object) -> bool:
    return _is_finite(value) and not math.isnan(value) and value >= 0  # type: ignore[arg-type, operator]


def _all_of(is_one: Callable[[object], bool]) -> Callable[[object], bool]:
    return lambda value: isinstance(value, Sequence) and not isinstance(value, str) and all(map(is_one, value))


_ANY = ("anything", lambda value: True)
_COUNT = ("a count", _is_count)
_NUMBER = ("a number", _is_number)  # or NaN, as a loss may be
_FINITE = ("a number", _is_finite)
_TEXT = ("a text", lambda value: isinstance(value, str))
_SECONDS = ("a list of seconds, of each pipeline rank", _all_of(_is_duration))
_FIELDS: Mapping[str, tuple[str, Callable[[object], bool]]] = {
    **dict.fromkeys(("step", "rank", "microbatch", "base_nbytes", "planned_nbytes", "peak_nbytes"), _COUNT),
    **dict.fromkeys(("loss", "grad_norm", "eval_loss"), _NUMBER),
    **dict.fromkeys(("tokens_per_s", "step_s", "stall_s", "mfu", "ts"), _FINITE),
    **dict.fromkeys((*_MEASURED, *_SIMULATED), _SECONDS),
    **dict.fromkeys(("num_stages", "num_ranks", "num_microbatches"), ("a number from 1 up", _is_positive)),
    **dict.fromkeys(("schedule", "checkpoint", "save_error"), _TEXT),
    "stages": ("a list of stages", _all_of(_is_count)),
    "style": ("loop or v", lambda value: value in ("loop", "v")),
    "dur": ("microseconds, 0 or more", _is_duration),
    "tid": ("a stage", _is_integer),
    "kind": (f"one of {', '.join(_KINDS)}", lambda value: value in tuple(_KINDS)),
    "args": ("an object", lambda value: isinstance(value, Mapping)),
}  # fmt: skip
# Required fields by the field that identifies the kind of a line; the first that a line has counts.
_NEEDED: Mapping[str, tuple[str, ...]] = {
    "load_s": ("rank", "stages"),
    "loss": ("step", "tokens_per_s"),
    "eval_loss": ("step",),
    "checkpoint": ("step", "stall_s"),
    "rank": ("peak_nbytes",),
}
