"""Shell completion, as a shell asks for it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

BIN = Path(sys.executable).parent


def asked(program: str, *words: str) -> list[str]:
    """Return what bash is answered at the end of these words: kind and value."""
    environment = {f"_{program.upper()}_COMPLETE": "bash_complete", "COMP_WORDS": " ".join((program, *words))}
    ended = subprocess.run(
        [BIN / program], env={**os.environ, **environment, "COMP_CWORD": str(len(words))}, capture_output=True,
        text=True, timeout=60, check=True,
    )  # fmt: skip
    return ended.stdout.split()


@pytest.mark.parametrize(
    ("program", "words", "answers"),
    [
        ("reshard", ("ver",), ["plain,verify"]),
        ("reshard", ("plan", "x", "--dtype-p"), ["plain,--dtype-policy"]),
        ("reshard", ("export", "x", "--to", "d"), ["plain,dcp", "plain,deepspeed"]),
        ("reshard", ("pack", "x", "--model", "mod"), ["file,mod"]),
        ("runner", ("launch", "--sched"), ["plain,--scheduler"]),
        ("runner", ("launch", "--scheduler", "s"), ["plain,slurm"]),
        ("runner", ("launch", "--job", "j"), ["file,j"]),
        ("runner", ("launch", "x", "--", "--global"), ["plain,--global-batch"]),
        ("runner", ("launch", "x", "--", "--quiet", "--load", "r"), ["plain,rows"]),
        ("runner", ("launch", "x", "--", "--data", "t"), ["file,t"]),
    ],
)
def test_verbs_flags_choices_and_paths_are_completed(program: str, words: tuple[str, ...], answers: list[str]) -> None:
    assert asked(program, *words) == answers


@pytest.mark.parametrize("program", ["reshard", "runner"])
@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_script_of_a_shell_is_printed(program: str, shell: str) -> None:
    ended = subprocess.run([BIN / program, "completion", shell], capture_output=True, text=True, timeout=60, check=True)
    assert f"_{program.upper()}_COMPLETE={shell}_complete" in ended.stdout
