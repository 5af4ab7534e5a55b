"""The standard streams of a command, which may be closed, full, broken, or have another encoding; and its help.

# Note [Standard streams]
If a standard descriptor is closed at startup, the first file that is opened would get its number, and output would be
written there. So it is opened on /dev/null first. If standard output cannot be written, the exit code is 3; if its
reader has gone, the command exits silently, like one killed by SIGPIPE; failed writes to standard error are ignored.
"""

from __future__ import annotations

import contextlib
import errno
import io
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from itertools import pairwise
from typing import Any

from manifests.command.signals import INTERRUPTED
from manifests.errors import (
    InputError,
    UsageError,
    UserError,
    error_json,
    naming_flags,
    refused_by_system,
    without_thread,
)

STDOUT = "standard output"
_TRAINING_FLAGS = (
    "schedule", "microbatches", "microbatch", "seq-len", "dtype-policy", "dp-replicate", "dp-shard", "tp", "ep",
    "ac", "loss-chunk", "memory-limit", "cost",
)  # fmt: skip
_SIMULATION_FLAGS = (
    "simulate-io", "store-gbit", "stream-mb-s", "latency-ms", "streams", "link-gbit", "disk-gb-s", "ranks-per-node",
)  # fmt: skip
# What was removed, as it was typed, and what to use instead.
MOVED = {
    "--allow-remote": "manifests refer to the hub, buckets and folders only, which need no consent",
    "reshard sign --out": "the signature is manifest.sig beside the manifest",
    "reshard verify --signature": "the signature is manifest.sig beside the manifest; copy it there",
    **dict.fromkeys(
        (f"reshard plan --{flag}" for flag in _SIMULATION_FLAGS),
        "the plan's first lines say what a layout takes; reading is not simulated",
    ),
    **dict.fromkeys(("reshard export --pp", "reshard export --tp"), "vLLM reads a packed folder as it is"),
    **dict.fromkeys(
        (f"reshard {verb} --strict-megatron" for verb in ("layout", "pack", "plan")),
        "white space is skipped, and nested groups are always refused",
    ),
    "reshard pack --take-over": "schedulers run lost parts again: --parts N --scheduler slurm, or job",
    **dict.fromkeys(
        (f"reshard pack --{flag}" for flag in _TRAINING_FLAGS),
        "a training step is assumed by reshard plan: plan with --write layout.toml, then pack --layout layout.toml",
    ),
    "reshard plan --memory-limit": "it is --gpu-memory",
    "reshard plan --dtype-policy": "--dtype and --master-dtype, as in training; mixed was bf16 and fp32",
    "runner report --trace": "it is --perfetto FILE; --trace chooses the steps of a run",
    "runner measure --run": "a run with --trace writes times.json into its log folder, for reshard plan --from-run",
    "reshard plan --as": "--write FILE writes the layout, as .toml or .json",
    "reshard layout --as": "--write FILE writes the layout, as .toml or .json",
    "runner generate": "a packed folder opens in transformers: AutoModelForCausalLM.from_pretrained(DIR).generate(...)",
}
_RED, _CYAN, _PLAIN = "\x1b[1;31m", "\x1b[36m", "\x1b[0m"
_BROKEN_PIPE = 141  # 128 + SIGPIPE, as in shells


def run_command(act: Callable[[], int], *, is_json: bool) -> None:
    """Run a command, print its error, and exit with its exit code."""
    open_streams()
    code = 0
    try:
        with naming_flags():
            code = act()
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0 if ended.code is None else 1
    except UserError as error:
        code = print_error(error, is_json=is_json)
    except KeyboardInterrupt as error:
        print("\nhint: ".join(("interrupted", *getattr(error, "__notes__", ()))), file=sys.stderr)
        code = INTERRUPTED
    except OSError as error:
        if _is_working_folder_gone():
            problem, hint = "the working folder was deleted or replaced", 'enter one that exists: cd "$PWD", or cd ..'
            code = print_error(InputError(".", problem, hint, code="system.no-working-folder"), is_json=is_json)
        elif error.filename is not None:
            problem = f"cannot be used: {error.strerror}"
            code = print_error(InputError(str(error.filename), problem, code="system.refused"), is_json=is_json)
        elif _unwritable() is None:
            raise
    except RuntimeError as error:
        if (refusal := without_thread(error)) is None:
            raise
        code = print_error(refusal, is_json=is_json)
    if code := _finish(code):
        sys.exit(code)


def run_cli(
    cli: Callable[[], object], begin: Callable[[], None], *, refusal: type[Exception], abort: type[Exception]
) -> None:
    """Run a click command, and end with its exit code; `--json` makes its refusals JSON, too.

    `begin` is called where an interrupt can be handled. click is not a dependency of this package: `refusal` is its
    ClickException, `abort` its Abort.
    """
    sys.argv[1:] = map(expand_home, sys.argv[1:])
    is_json = "--json" in sys.argv[1:]

    def act() -> int:
        try:
            begin()
            _refuse_empty(sys.argv[1:])
            cli()
        except refusal as caught:
            error: Any = caught
            if type(error).__name__ == "NoArgsIsHelpError" and not is_json:
                error.show()
                return UsageError.exit_code
            if (moved := _moved(error)) is not None:
                raise moved from None
            from manifests.command.neighbors import usage_error  # slow to import

            raise usage_error(error) from caught
        except abort as caught:
            interrupt = caught.__context__
            raise (interrupt if isinstance(interrupt, KeyboardInterrupt) else KeyboardInterrupt()) from None
        return 0

    run_command(act, is_json=is_json)


def _refuse_empty(words: Sequence[str]) -> None:
    """Refuse an empty word, as a shell writes `--out "$OUT"` where the variable is not set.

    It would be the folder ., a pattern that matches all, or the default.
    """
    for word, following in pairwise((*words, "-")):
        flag, joined, value = word.partition("=")
        if not following or (joined and not value and flag.startswith("--")):
            problem, hint = "is followed by an empty value", "give one; if it is a variable's, the variable is not set"
            raise UsageError(flag if word.startswith("-") else word, problem, hint, code="usage.arguments")


def _moved(error: Any) -> UsageError | None:
    """Return the refusal of a verb or a flag that was removed, if the error of click is about one."""
    context = getattr(error, "ctx", None)
    word = getattr(error, "option_name", None) or next(iter(sys.argv[1:]), "")
    typed = f"{context.command_path if context else ''} {word}"
    where = next((removed for removed in (typed, word) if removed in MOVED), None)
    return UsageError(where, "was removed", MOVED[where], code="usage.moved") if where else None


def _is_working_folder_gone() -> bool:
    try:
        os.getcwd()
    except OSError:
        return True
    return False


def expand_home(word: str) -> str:
    """Expand the `~` of `--out=~/x` or a quoted `~/x`, which shells leave to the command: no folder is named `~`."""
    flag, equals, value = word.partition("=") if word.startswith("--") else ("", "", word)
    return flag + equals + (os.path.expanduser(value) if value == "~" or value.startswith("~/") else value)


def open_streams() -> None:
    """Make the standard streams safe to write to, once, before anything else; see Note [Standard streams]."""
    for descriptor in (0, 1, 2):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number: this one
            if descriptor == 1:
                sys.stdout = _Closed()
            elif descriptor == 2:
                sys.stderr = open(2, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives
    if sys.stdout is sys.__stdout__ and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout = _Stdout(
            sys.stdout.buffer,
            encoding=sys.stdout.encoding,
            errors="backslashreplace",  # characters that the encoding lacks must not fail, as in the C locale
            line_buffering=sys.stdout.line_buffering,
        )
    if sys.stderr is sys.__stderr__ and isinstance(sys.stderr, io.TextIOWrapper):
        sys.stderr = _Lenient(
            sys.stderr.buffer, encoding=sys.stderr.encoding, errors="backslashreplace", line_buffering=True
        )


def check_open() -> None:
    """Check that standard output is open and has accepted everything printed so far."""
    if (error := _unwritable()) is not None:
        _discard()
        raise _unprinted(error) from error


class _Stdout(io.TextIOWrapper):
    """A standard output that remembers its first failure, since a later flush may succeed."""

    failure: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.failure = error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.failure = error
            raise


class _Closed(_Stdout):
    """A standard output that was closed at startup: every write fails."""

    def __init__(self) -> None:
        super().__init__(io.BytesIO(), encoding="utf-8", errors="backslashreplace")
        self.failure = OSError(errno.EBADF, os.strerror(errno.EBADF))

    def write(self, text: str) -> int:
        assert self.failure is not None
        raise self.failure


class _Lenient(io.TextIOWrapper):
    """A standard error that ignores failed writes."""

    def write(self, text: str) -> int:
        with contextlib.suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with contextlib.suppress(OSError):
            super().flush()


def print_error(error: UserError, *, is_json: bool) -> int:
    """Print an error, in color on a terminal unless NO_COLOR is set, and return its exit code."""
    text = f"error: {error}"
    if not is_json and sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        text = text.replace("error:", f"{_RED}error:{_PLAIN}", 1).replace("\nhint:", f"\n{_CYAN}hint:{_PLAIN}")
    with contextlib.suppress(OSError):  # the exit code remains, and standard output is checked at the end
        print(error_json(error) if is_json else text, file=sys.stdout if is_json else sys.stderr, flush=True)
    return error.exit_code


def _finish(code: int) -> int:
    """Flush standard output and return the exit code of a command."""
    error = _unwritable()
    if error is None:
        return code
    _discard()
    if isinstance(error, BrokenPipeError):
        return _BROKEN_PIPE if code in (0, 1) else code  # click exits with 1
    if code in (0, 1):
        return print_error(_unprinted(error), is_json=False)
    return code


def _unprinted(error: OSError) -> InputError:
    return refused_by_system(STDOUT, error, "cannot be written", code="output.unwritable")


def _unwritable() -> OSError | None:
    """Flush standard output and return its failure; None if everything was written."""
    stream = getattr(sys.stdout, "wrapped", sys.stdout)  # click wraps a stream whose reader has gone
    with contextlib.suppress(OSError):  # kept in `failure`
        if stream is not None:
            stream.flush()
    return stream.failure if isinstance(stream, _Stdout) else None


def _discard() -> None:
    """Drop what could not be written, which would be retried at exit."""
    with contextlib.suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.close(null)
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115 - for as long as the process lives


def table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left_columns: frozenset[str] = frozenset()) -> str:
    """Return a table with aligned columns: `left_columns` to the left, others to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = []
    for row in (head, *rows):
        cells = (
            cell.ljust(width) if name in left_columns else cell.rjust(width)
            for cell, width, name in zip(row, widths, head, strict=True)
        )
        lines.append("  ".join(cells).rstrip())
    return "\n".join(lines)


class GroupedHelp:
    """Mixed into a `click.Command`: `groups` are the titles, and the names of the parameters below each.

    Parameters of no group come last, under "Options".
    """

    def __init__(self, *args: Any, groups: Mapping[str, Sequence[str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.groups = groups

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write the options as click does, a section for each group."""
        command: Any = self
        options = (parameter for parameter in command.get_params(ctx) if parameter.param_type_name == "option")
        records = {option.name: option.get_help_record(ctx) for option in options}
        sections = {title: [records.pop(name, None) for name in names] for title, names in self.groups.items()}
        for title, listed in {**sections, "Options": [*records.values()]}.items():
            if rows := [record for record in listed if record is not None]:
                with formatter.section(title):
                    formatter.write_dl(rows)


class LazyGroup:
    """Mixed into a `click.Group`, of whose verbs only the one that is called is imported.

    `verbs` are, by name, where a verb is, `module:attribute`, and its line in the list of verbs.
    """

    def __init__(self, *args: Any, verbs: Mapping[str, tuple[str, str]], **settings: Any) -> None:
        super().__init__(*args, **settings)
        self.verbs = verbs

    def list_commands(self, _: Any) -> list[str]:
        """Return the names of the verbs."""
        return list(self.verbs)

    def get_command(self, _: Any, cmd_name: str) -> Any:
        """Return a verb, or None if there is none of this name."""
        if cmd_name not in self.verbs:
            return None
        module, _, name = self.verbs[cmd_name][0].partition(":")
        return getattr(import_module(module), name)

    def import_verbs(self) -> list[Any]:
        """Return all verbs."""
        return [self.get_command(None, name) for name in self.verbs]

    def format_commands(self, _: Any, formatter: Any) -> None:
        """Write the list of verbs."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, line) for name, (_, line) in self.verbs.items()])
