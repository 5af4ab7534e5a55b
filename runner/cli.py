"""The runner command: signals first, then what it needs to import."""

from __future__ import annotations

from manifests.command.interpreter import leave_out_working_folder
from manifests.command.signals import interrupts


def main() -> None:
    """Run the command; end with its exit code."""
    leave_out_working_folder()
    with interrupts() as begin:
        from runner.commands import run

        run(begin)


if __name__ == "__main__":
    main()
