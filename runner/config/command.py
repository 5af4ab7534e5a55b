"""Commands whose own arguments end at `--`, such as `runner launch`: training options follow."""

from __future__ import annotations

import click
from click.core import ParameterSource
from click.shell_completion import CompletionItem, ShellComplete

from manifests.command.console import GroupedHelp
from manifests.errors import UsageError
from runner.config.flags import parse_training, training_command


class BeforeTraining(GroupedHelp, click.Command):
    """A command whose own arguments end at `--`; training options follow, in `ctx.meta["training"]`."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        command_args = args[: args.index("--")] if "--" in args else args
        ctx.meta["training"] = training = tuple(args[len(command_args) + 1 :])
        ctx.meta["is_past_dashes"] = len(command_args) < len(args)
        if {"--help", "-h"} & set(training) and not ctx.resilient_parsing:
            parse_training(("--help",))
        try:
            return super().parse_args(ctx, command_args)
        except click.BadParameter as error:
            name = error.param.name if error.param is not None else None
            if name is not None and ctx.get_parameter_source(name) is ParameterSource.DEFAULT_MAP:
                message = f"{error.message.rstrip('.')} (the job file)"
                raise click.BadParameter(message, error.ctx, error.param) from error
            raise
        except click.NoSuchOption as error:
            if is_training_flag(error.option_name):
                hint = f"put it after --: {ctx.command_path} … -- {error.option_name} …"
                raise UsageError(error.option_name, "is a training flag", hint, code="launch.flag-order") from error
            raise

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        if not ctx.meta["is_past_dashes"]:
            return super().shell_complete(ctx, incomplete)
        return ShellComplete(training_command, {}, "", "").get_completions([*ctx.meta["training"]], incomplete)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        return [*super().collect_usage_pieces(ctx), "[-- TRAINING OPTIONS]"]


def is_training_flag(flag: str) -> bool:
    """Whether `--data`, say, is a training option."""
    return any(flag in (*param.opts, *param.secondary_opts) for param in training_command.params)
