"""The reshard command: flags in, text out. What a command needs is imported when it runs."""

from manifests.signals import interrupts

__all__ = ["main"]


def main() -> None:
    """Run the command, signals first; end with its exit code."""
    with interrupts() as begin:
        from reshard.cli.command import run

        run(begin)
