"""Names for programs that run, open and study runs, as `retrain.lab` does. Components need only `retrain` itself.

`train` and `run_campaign` do what `retrain train` and `retrain campaign` do.
"""

from __future__ import annotations

import importlib
import json
import random
import sys
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w

from retrain.config.load import load as load
from retrain.errors import ConfigError
from retrain.storage.run_files import read_rows
from retrain.system.process import thread_waiting
from retrain.system.terminal import warn

if TYPE_CHECKING:
    from retrain.campaign.plan.load_campaign import LoadedCampaign
    from retrain.campaign.plan.load_campaign import load_campaign as load_campaign
    from retrain.campaign.verdict.verdict_page import Report
    from retrain.run.collectors.rollouts import sampled as sampled
    from retrain.run.collectors.rollouts import score as score
    from retrain.run.collectors.rollouts import train_sampling as train_sampling
    from retrain.run.collectors.rollouts import valid_rows as valid_rows
    from retrain.run.episodes import FAILED as FAILED
    from retrain.run.episodes import EpisodeRunner as EpisodeRunner
    from retrain.run.episodes import turn_stream as turn_stream
    from retrain.run.evaluate import measure as measure
    from retrain.run.loop import seed_generators as seed_generators
    from retrain.run.reopen import each_checkpoint as each_checkpoint
    from retrain.run.reopen import reopen as reopen
    from retrain.run.run_context import RunContext as RunContext

_MODULES = {
    "load_campaign": "retrain.campaign.plan.load_campaign",
    **dict.fromkeys(("sampled", "score", "train_sampling", "valid_rows"), "retrain.run.collectors.rollouts"),
    **dict.fromkeys(("EpisodeRunner", "FAILED", "turn_stream"), "retrain.run.episodes"),
    "measure": "retrain.run.evaluate",
    "seed_generators": "retrain.run.loop",
    **dict.fromkeys(("each_checkpoint", "reopen"), "retrain.run.reopen"),
    "RunContext": "retrain.run.run_context",
}
"""Names of other modules. They are imported on first use: a program that only reads a configuration needs no torch."""
_DICT = "dict"
"""Name of the content of a dict in errors, and default name of its run."""


@dataclass(frozen=True)
class Run:
    """A run on disk. `Run(Path("runs/NAME"))` opens an earlier one.

    Its methods read the files anew at each call, also while the run trains. They raise StorageError for damaged files.

    Attributes:
        path: the run directory.
    """

    path: Path

    def metrics(self) -> list[dict[str, Any]]:
        """Return the rows of metrics.jsonl, one for each step: "step" and the values of all metrics."""
        return read_rows(self.path / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        """Return the rows of eval.jsonl, one for each evaluation: "step", "accuracy" and more."""
        return read_rows(self.path / "eval.jsonl")

    def samples(self) -> list[dict[str, Any]]:
        """Return the stored completions of all steps, each with its "step", "prompt", "text" and "reward".

        `[logging] rollouts_every` decides which steps are stored.
        """
        from retrain.report.samples import step_of

        # Steps have six digits, so that the names sort as the numbers.
        files = sorted(self.path.glob("rollouts/step-*.jsonl.gz"))
        return [{"step": step_of(file), **row} for file in files for row in read_rows(file)]

    def model(self) -> tuple[Any, Any]:
        """Load the final model and its tokenizer: a causal language model of transformers, in float32 on the CPU.

        With LoRA the adapter is merged.

        Raises:
            ConfigError: the run has no final model.
            StorageError: its files are broken.
        """
        folder = self.path / "model"
        if not (folder / "config.json").is_file():
            fix = f"retrain export {self.path} writes the model of its newest checkpoint"
            raise ConfigError.at(self.path, "run", "has no final model", fix)
        from retrain.training.model.loading import load_model

        loaded = load_model(str(folder))
        return loaded.model, loaded.tokenizer


@dataclass(frozen=True)
class CampaignResult:
    """A campaign on disk, with its verdicts.

    Attributes:
        path: the directory of the campaign, with report.html.
        report: the verdict as text, as `retrain campaign` prints it.
        verdicts: a row for each comparison: "condition", "against", "kind", "sentence", "difference" and more, as in
            the JSON of `retrain compare`.
        failed: True if a run has no result.
    """

    path: Path
    report: str
    verdicts: list[dict[str, Any]]
    failed: bool

    def runs(self) -> list[Run]:
        """Return the runs, without those that looks have saved: those of the first seed before those of the second."""
        from retrain.campaign.schedule import Schedule
        from retrain.campaign.work.campaign_directory import CampaignDirectory

        campaign = CampaignDirectory(self.path)
        return [Run(campaign.run(job)) for job in Schedule(campaign).needed()]


@contextmanager
def _random_kept() -> Generator[None]:
    """Restore the state of Python's random numbers, which training seeds, and from which importing rich draws."""
    state = random.getstate()
    try:
        yield
    finally:
        random.setstate(state)


@_random_kept()
def train(file: str | Path | Mapping[str, Any], *, fresh: bool = False, plain: bool = False, **overrides: Any) -> Run:
    """Train a model, as `retrain train` does, and show the progress in the terminal or notebook.

    Args:
        file: path of the TOML file, or its content as a dict. The run of a dict is called "dict" unless
            `logging={"name": ...}` names it.
        fresh: delete an earlier run of this name first.
        plain: print lines instead of the live display.
        overrides: tables whose keys override those of the file, as after `--set`: `training={"max_steps": 10}`.
    Returns:
        The finished run.
    Raises:
        RetrainError: the run failed; the message is that of the command.
        KeyboardInterrupt: Ctrl-C, or "interrupt" in a notebook.
    """
    # Before the import of torch, which reads the setting once.
    _choose_waiting()
    path, text = (_DICT, _as_toml(file)) if isinstance(file, Mapping) else (file, None)
    # As flags of `--set`, so that overrides are checked and reported as on the command line.
    loaded = load(path, _as_flags(overrides), text)
    warn(loaded.warnings)
    # After the configuration is checked, because these modules import torch, which takes seconds.
    from retrain.display.run_display import display
    from retrain.run.session import Resume, run

    mode = "fresh" if fresh else "auto" if loaded.config.checkpoint.resume == "auto" else "new"
    with display(plain) as observe:
        observe("run", {"directory": str(loaded.directory)})
        return Run(run(loaded, Resume(mode), observe))


@_random_kept()
def run_campaign(
    file: str | Path, *, fresh: bool = False, retry_failed: bool = False, plain: bool = False, **overrides: Any
) -> CampaignResult:
    """Run the conditions of a campaign with every seed and write its report, as `retrain campaign` does.

    Runs that have ended are not repeated.

    Args:
        file: path of the TOML file.
        fresh: delete an earlier campaign of this name first.
        retry_failed: start failed runs again.
        plain: print lines instead of the live display.
        overrides: see `train`; `campaign={"seeds": 4}` changes the campaign.
    Raises:
        RetrainError: the campaign could not run; the message is that of the command. A run that fails raises nothing.
        KeyboardInterrupt: Ctrl-C, or "interrupt" in a notebook; the same call resumes the campaign.
    """
    from retrain.campaign.plan.load_campaign import load_campaign
    from retrain.campaign.verdict import sentences

    loaded = load_campaign(file, _as_flags(overrides))
    warn(loaded.warnings)
    report, failed = run_and_report(loaded, fresh, retry_failed, plain)
    rows = sentences.as_json(report.analysis)["comparisons"]
    return CampaignResult(loaded.directory, report.text, rows, failed)


def run_and_report(loaded: LoadedCampaign, fresh: bool, retry_failed: bool, plain: bool) -> tuple[Report, bool]:
    """Run a campaign with its display, and write its report; return it, and True if a run has no result."""
    from retrain.campaign.driver import run_campaign
    from retrain.campaign.schedule import Schedule
    from retrain.campaign.verdict.verdict_page import write_report
    from retrain.display.campaign_display import matrix

    with matrix(plain=plain) as observe:
        directory = run_campaign(loaded, observe, fresh=fresh, retry_failed=retry_failed)
    return write_report(directory.path), Schedule(directory).failed()


def _choose_waiting() -> None:
    """Choose how threads wait, as the command does. An imported torch has read the setting already."""
    if "torch" not in sys.modules:
        thread_waiting.sleep()
        thread_waiting.spin_if_quiet()


def _as_toml(data: Mapping[str, Any]) -> str:
    try:
        return tomli_w.dumps(data)
    except (TypeError, ValueError) as error:
        fix = "use what TOML has; leave a key with None out"
        raise ConfigError.at(_DICT, "file", f"not valid TOML: {error}", fix) from None


def _as_flags(tables: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Return the values of nested tables as `key=value`, as after `--set`."""
    return [flag for key, value in tables.items() for flag in _flags(f"{prefix}{key}", value)]


def _flags(key: str, value: Any) -> Iterator[str]:
    # An empty table has no key to set, and is itself the value.
    if isinstance(value, Mapping) and value:
        yield from _as_flags(value, f"{key}.")
    elif value is None:
        raise ConfigError.at("overrides", key, "TOML has no None", "leave the key out")
    else:  # JSON with "=" after keys is TOML
        yield f"{key}={json.dumps(value, ensure_ascii=False, separators=(', ', '='), default=str)}"


def __getattr__(name: str) -> Any:
    if name in _MODULES:
        return getattr(importlib.import_module(_MODULES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
