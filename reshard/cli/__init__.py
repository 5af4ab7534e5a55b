"""The reshard command: flags in, text out. What a command needs is imported when it runs."""

from manifests.command.interpreter import leave_out_working_folder
from manifests.command.signals import interrupts

__all__ = ["main"]


def main() -> None:
    """Run the command, signals first; end with its exit code."""
    leave_out_working_folder()
    with interrupts() as begin:
        from reshard.cli.command import run

        run(begin)
