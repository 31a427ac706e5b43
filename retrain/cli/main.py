"""The `retrain` command. A subcommand's module is imported when it runs, so that `--help` stays quick."""

from __future__ import annotations

import importlib
import logging
import os
from contextlib import suppress
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from retrain import __version__
from retrain.errors import RetrainError
from retrain.system.terminal import CleanHandler, say

COMMANDS: dict[str, tuple[str, str]] = {
    "train": ("retrain.cli.run_commands:train", "Train a model as a TOML file says."),
    "serve": ("retrain.cli.run_commands:serve", "Start a vLLM server for a run, or talk to a policy by HTTP."),
    "campaign": ("retrain.cli.campaign_commands:campaign", "Run conditions x seeds and compare them with statistics."),
    "testbed": ("retrain.cli.campaign_commands:judge", "Say on which tasks a method helps: a report card."),
    "worker": ("retrain.cli.campaign_commands:worker", "Join a campaign from this machine."),
    "validate": (
        "retrain.cli.config_commands:validate",
        "Check a configuration; every mistake with line, column and fix.",
    ),
    "explain": ("retrain.cli.config_commands:explain", "Show what a configuration will do, without doing it."),
    "eval": ("retrain.cli.trained_commands:evaluate", "Evaluate a trained model on held-out problems."),
    "sample": ("retrain.cli.trained_commands:sample", "Talk to a trained model."),
    "play": ("retrain.cli.trained_commands:play", "Play an environment, or watch a run's model play it."),
    "report": ("retrain.cli.trained_commands:report", "Write one HTML file about a run or a campaign."),
    "compare": ("retrain.cli.campaign_commands:compare", "Compare runs: paired differences, intervals, exact tests."),
    "status": ("retrain.cli.run_commands:status", "Show how far runs and campaigns are."),
    "export": ("retrain.cli.trained_commands:export", "Write a run's model for other tools; upload it."),
    "data prepare": (
        "retrain.cli.data_commands:data",
        "Write problems as train and val files for retrain, verl and slime.",
    ),
    "model fetch": ("retrain.cli.model_commands:fetch", "Download a pretrained model for builtin:NAME, with pip."),
    "verify": ("retrain.cli.formula_commands:verify", "Check properties of the formulas on random inputs."),
    "credit": ("retrain.cli.formula_commands:credit", "Compare advantages on a file of rewards and lengths."),
    "audit": (
        "retrain.cli.audit_commands:audit",
        "Judge credit assignment by true advantages, before training.",
    ),
    "score": ("retrain.cli.score_commands:score", "Score a file of rollouts: pass@k, tokens, AES against a base."),
    "grams extract": ("retrain.cli.data_commands:extract", "Extract strategic grams from successful solutions."),
    "task export": ("retrain.cli.data_commands:export", "Write a task's worked solutions as expert data."),
    "prm score": ("retrain.cli.score_commands:score_solutions", "Score solutions with a process reward model."),
    "init": ("retrain.cli.setup_commands:init", "Write a commented configuration to start from."),
    "schema": ("retrain.cli.config_commands:schema", "Print the JSON Schema of configurations, for editors."),
    "plugins": ("retrain.cli.setup_commands:plugins", "List every component with its parameters."),
    "doctor": ("retrain.cli.setup_commands:doctor", "Check this machine: Python, torch, devices, extras."),
}
"""Command, or group and command -> (module:function, line in the help)."""


class Commands(TyperGroup):
    """The subcommands of COMMANDS, imported on use; errors of the package become a message and an exit code."""

    def list_commands(self, ctx: Any) -> list[str]:
        """Names in the order of the help."""
        return list(dict.fromkeys(name.split()[0] for name in COMMANDS))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """Import the command's module, or build the group of that first word; None for an unknown name."""
        names = [name for name in COMMANDS if name.split()[0] == cmd_name]
        if not names:
            return None
        several = names != [cmd_name]
        group = typer.Typer(add_completion=False, rich_markup_mode=None, no_args_is_help=several)
        for name in names:
            module, _, function = COMMANDS[name][0].partition(":")
            group.command(name.split()[-1])(getattr(importlib.import_module(module), function))
        if several:
            group.callback(help=f"{'; '.join(COMMANDS[name][1].rstrip('.') for name in names)}.")(_nothing)
        return typer.main.get_command(group)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """The list of commands, from the table alone."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])

    def invoke(self, ctx: Any) -> Any:
        """Run the command; RETRAIN_DEBUG=1 shows tracebacks."""
        try:
            return super().invoke(ctx)
        except RetrainError as error:
            if os.environ.get("RETRAIN_DEBUG"):
                raise
            with suppress(OSError):  # the exit code says it as well
                say("\n".join([str(error), *getattr(error, "__notes__", ())]), error=True)
            raise typer.Exit(error.exit_code) from None
        except KeyboardInterrupt as stopped:
            with suppress(OSError):
                say("\n".join(["interrupted", *getattr(stopped, "__notes__", ())]), error=True)
            raise typer.Exit(130) from None


def _nothing() -> None:
    """A group without options of its own."""


app = typer.Typer(
    cls=Commands,
    name="retrain",
    help="Composable reinforcement learning for language models, from one TOML file.",
    epilog="Start with: retrain init run.toml",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
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
    try:
        app()
    except SystemExit as end:
        from retrain.training.ranks import launched, leave

        if end.code and launched():
            leave(int(end.code))
        raise


if __name__ == "__main__":
    main()
