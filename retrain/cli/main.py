"""The `retrain` command. A subcommand's module is imported only when it runs, so that `--help` stays fast."""

from __future__ import annotations

import errno
import importlib
import inspect
import logging
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from retrain.errors import ConfigError, RetrainError, StorageError, UserCodeError, did_you_mean
from retrain.system.process import thread_waiting
from retrain.system.terminal import CleanHandler, forgiving_output, say
from retrain.version import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("retrain.cli.run_commands:train", "Train a model from a TOML file."),
    "serve": ("retrain.cli.serve_commands:serve", "Serve a trained model, or start a vLLM server for a run."),
    "campaign": ("retrain.cli.campaign_commands:campaign", "Run conditions x seeds and compare them with statistics."),
    "worker": ("retrain.cli.campaign_commands:worker", "Join a campaign from this machine."),
    "validate": (
        "retrain.cli.config_commands:validate",
        "Check a configuration; list every error with line, column and fix.",
    ),
    "explain": ("retrain.cli.config_commands:explain", "Show what a configuration will do, without doing it."),
    "reward check": ("retrain.cli.config_commands:check_rewards", "Show what rewards pay for right and wrong answers."),
    "eval": ("retrain.cli.trained_commands:evaluate", "Evaluate a trained model on held-out problems."),
    "sample": ("retrain.cli.trained_commands:sample", "Chat with a trained model."),
    "play": ("retrain.cli.trained_commands:play", "Play an environment, or watch a run's model play it."),
    "report": ("retrain.cli.trained_commands:report", "Write one HTML file about a run or a campaign."),
    "compare": ("retrain.cli.campaign_commands:compare", "Compare runs: paired differences, intervals, exact tests."),
    "status": ("retrain.cli.trained_commands:status", "Show the progress of runs and campaigns."),
    "export": ("retrain.cli.trained_commands:export", "Write a run's model for other tools; upload it."),
    "data prepare": (
        "retrain.cli.data_commands:data",
        "Write problems as train and val files for retrain, verl and slime.",
    ),
    "model fetch": ("retrain.cli.model_commands:fetch", "Download a pretrained model for builtin:NAME, with pip."),
    "score": ("retrain.cli.score_commands:score", "Score a file of rollouts: pass@k, tokens, AES against a base."),
    "task export": ("retrain.cli.data_commands:export", "Write a task's worked solutions as expert data."),
    "prm score": ("retrain.cli.score_commands:score_solutions", "Score solutions with a process reward model."),
    "help": ("retrain.cli.setup_commands:show_help", "Print a page or section of the documentation, or search it."),
    "init": ("retrain.cli.setup_commands:init", "Write a commented configuration to start from."),
    "schema": ("retrain.cli.config_commands:schema", "Print the JSON Schema of configurations, for editors."),
    "plugins": ("retrain.cli.setup_commands:plugins", "List every component with its parameters."),
    "doctor": ("retrain.cli.setup_commands:doctor", "Check this machine: Python, torch, devices, extras."),
}
"""Command, or group and command -> (module:function, line in the help)."""

ENTRY_POINTS = "retrain.commands"
"""Group of entry points that add commands: `name = "module:function"`, or `group.name` for a command of a group."""


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the commands that entry points of installed packages add; they cannot replace those of COMMANDS."""
    # Entry points cannot have a space in their name.
    points = {point.name.replace(".", " "): point for point in entry_points(group=ENTRY_POINTS)}
    return {name: points[name] for name in sorted(points.keys() - COMMANDS.keys())}


def command_names() -> list[str]:
    """Return all commands in the order of the help."""
    return [*COMMANDS, *installed()]


def load_command(name: str) -> Callable[..., Any]:
    """Import the function of a command.

    Raises:
        UserCodeError: the module of an entry point raised an exception.
    """
    if name in COMMANDS:
        module, _, function = COMMANDS[name][0].partition(":")
        return getattr(importlib.import_module(module), function)
    point = installed()[name]
    # An installed package may raise anything, and only its own command should fail.
    try:
        return point.load()
    except Exception as error:
        package = point.dist.name if point.dist else point.value
        problem = f"importing {point.value} raised {type(error).__name__}: {error}"
        raise UserCodeError(f'command "{name}" of {package}: {problem}') from error


def summary(name: str) -> str:
    """Return the line of a command in the help. For an entry point it is the first line of its docstring."""
    if name in COMMANDS:
        return COMMANDS[name][1]
    try:
        return (inspect.getdoc(load_command(name)) or "").partition("\n")[0]
    except UserCodeError as error:
        return f"cannot be used: {error}"


class Commands(TyperGroup):
    """Group of the subcommands, which are imported on use. Errors of retrain become a message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Return the first words of all commands in the order of the help."""
        return list(dict.fromkeys(name.split()[0] for name in command_names()))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Return the command of this name, or the group of the commands that begin with it; None if unknown."""
        names = [name for name in command_names() if name.split()[0] == cmd_name]
        if not names:
            return None
        # Typer makes a group of several commands, and a plain command of one.
        several = names != [cmd_name]
        group = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=several)
        for name in names:
            group.command(name.split()[-1])(load_command(name))
        if several:
            group.callback(help=f"{'; '.join(summary(name).rstrip('.') for name in names)}.")(_no_options)
        return typer.main.get_command(group)

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command that the first argument names; an unknown one fails with the most similar name."""
        commands = self.list_commands(ctx)
        if args and args[0] not in commands and (near := did_you_mean(args[0], commands)):
            ctx.fail(f'no such command "{args[0]}"; {near}')
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """List every command. Only the modules of entry points are imported, for their docstrings."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary(name)) for name in command_names()])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; RETRAIN_DEBUG=1 shows tracebacks."""
        try:
            return super().invoke(ctx)
        except RetrainError as error:
            if os.environ.get("RETRAIN_DEBUG"):
                raise
            with suppress(OSError):  # the exit code reports the error as well
                say("\n".join([str(error), *getattr(error, "__notes__", ())]), error=True)
            raise typer.Exit(error.exit_code) from None
        except OSError as error:  # a file or the output, of which no command says more
            if os.environ.get("RETRAIN_DEBUG"):
                raise
            with forgiving_output():  # Python writes what is left in its buffers when it ends
                say(f"{error.filename or 'output'}: {error.strerror or error}", error=True)
                sys.stdout.flush()
            kind = ConfigError if error.errno == errno.ENAMETOOLONG else StorageError
            raise typer.Exit(kind.exit_code) from None
        except KeyboardInterrupt as stopped:
            with suppress(OSError):
                say("\n".join(["interrupted", *getattr(stopped, "__notes__", ())]), error=True)
            raise typer.Exit(130) from None


def _no_options() -> None:
    """Serve as the callback of a group of commands, which has no options of its own."""


app = typer.Typer(
    cls=Commands,
    name="retrain",
    help="Composable reinforcement learning for language models, from one TOML file.",
    epilog="Start with: retrain init run.toml",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"token_normalize_func": lambda name: name.replace("_", "-")},  # --n_min is --n-min
)


def _print_version(wanted: bool) -> None:
    if wanted:
        say(f"retrain {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_print_version, is_eager=True)
    ] = False,
) -> None:
    """Options of `retrain` itself."""


def main() -> None:
    """Entry point of the `retrain` command."""
    logging.lastResort = CleanHandler(logging.WARNING)
    thread_waiting.sleep()
    try:
        app()
    except SystemExit as end:
        from retrain.system.process import launched
        from retrain.training.distributed.ranks import leave

        # A rank that ends with an error tells the others, which would otherwise wait for it.
        if end.code and launched():
            leave(int(end.code))
        raise
