"""Trackers for Weights & Biases, TensorBoard and trackio.

A tracker connects at the first row and not when it is built: if the service fails, its `SafeTracker` disables it and
the run goes on. It sends the metrics, the resolved configuration with secrets masked, and as many completions as
`[logging] completions` says. It does not send the command line, environment variables, source files or console output.
"""

from __future__ import annotations

import json
import math
import netrc
import os
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal
from uuid import uuid4

from retrain.protocols import Tracker
from retrain.registry import tracker
from retrain.system.files import write_text
from retrain.system.masking import masked

_ID_LETTERS = 8
"""Letters of a run's id in its name for trackio: enough that two runs of one name never have the same."""


class _Service(Tracker):
    """Base class of trackers whose library opens a run, with the resolved configuration, and logs rows to it."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self._run_dir = run_dir
        self._options = options
        self._run = None

    def completions(self, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """Send the completions of a step as a table."""
        self._send_table(step, list(rows[0]), [list(row.values()) for row in rows])

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()

    @property
    def _service_run(self) -> Any:
        """The run of the service, opened at the first access."""
        if self._run is None:
            self._run: Any = self._connect(config=stored_config(self._run_dir), **self._options)
            self.where = self._location()
        return self._run

    @abstractmethod
    def _connect(self, **options: Any) -> Any: ...

    @abstractmethod
    def _location(self) -> str: ...

    @abstractmethod
    def _send_table(self, step: int, columns: list[str], data: list[list[Any]]) -> None: ...


@tracker("wandb")
class Wandb(_Service):
    """Log to Weights & Biases. Without a key it logs offline, into the run directory. A resumed run keeps its id.

    Args:
        project: project of the run.
        name: name of the run; by default the name of the run directory.
        group: group of runs, such as those of one condition of a campaign.
        tags: labels of the run.
        mode: "auto" is online if WANDB_API_KEY or a netrc entry has a key, otherwise offline.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str = "retrain",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] = [],  # noqa: B006 - never modified; a TOML array
        mode: Literal["auto", "online", "offline"] = "auto",
    ) -> None:
        super().__init__(run_dir, project=project, name=name or run_dir.name, group=group, tags=tags, mode=mode)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the metrics of a step."""
        self._service_run.log({**metrics, "step": step})

    def resumed(self, rows: Sequence[tuple[int, Mapping[str, Any]]]) -> None:
        """Offline, log the rows again, so that this folder is complete: a kill leaves the one before empty."""
        if self._service_run.offline:
            for step, metrics in rows:
                self.log(step, metrics)

    def _send_table(self, step: int, columns: list[str], data: list[list[Any]]) -> None:
        import wandb

        self.log(step, {"completions": wandb.Table([*columns], [*data], allow_mixed_types=True)})

    def _location(self) -> str:
        """Return the URL of the run; offline, the command that uploads it."""
        offline = self._run.offline  # checked first, because wandb warns if the URL of an offline run is read
        return f"wandb sync {Path(self._run.dir).parent}" if offline else str(self._run.url)

    def _connect(self, *, mode: Literal["auto", "online", "offline"], **options: Any) -> Any:
        import wandb

        mode = mode if mode != "auto" else "online" if _wandb_key() else "offline"
        settings = wandb.Settings(
            silent=True,
            console="off",
            disable_code=True,
            disable_git=True,
            save_code=False,
            x_disable_meta=True,
            x_disable_machine_info=True,
            x_save_requirements=False,
            init_timeout=30,
        )
        identity = {"id": run_id(self._run_dir), "resume": "allow"}
        run: Any = wandb.init(dir=self._run_dir, mode=mode, settings=settings, **identity, **options)
        # An explicit axis: evaluations and steps share it, and a resumed run may log a step again.
        run.define_metric("*", step_metric="step")
        return run


@tracker("tensorboard", extra=("tensorboard", "tensorboard"))
class Tensorboard(_Service):
    """Write TensorBoard event files into `tensorboard/` of the run directory.

    The configuration and the completions are logged as texts.
    """

    def __init__(self, run_dir: Path) -> None:
        super().__init__(run_dir)

    def close(self) -> None:
        """Flush and close the event file."""
        if self._run is not None:
            self._run.close()

    def _location(self) -> str:
        return f"tensorboard --logdir {self._run_dir / 'tensorboard'}"

    def _connect(self, *, config: Mapping[str, Any], **options: Any) -> Any:
        from torch.utils.tensorboard import SummaryWriter

        # TensorBoard drops what an interrupted run wrote from `purge_step` on.
        writer = SummaryWriter(str(self._run_dir / "tensorboard"), **options)
        writer.add_text("config", f"```\n{json.dumps(config, indent=1)}\n```")
        return writer

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Add a scalar for each metric of a step."""
        writer = self._writer(step)
        for name, value in metrics.items():
            writer.add_scalar(name, value, step)

    def _send_table(self, step: int, columns: list[str], data: list[list[Any]]) -> None:
        texts = ("\n".join(f"{name}: {cell}" for name, cell in zip(columns, row, strict=True)) for row in data)
        self._writer(step).add_text("completions", "\n\n".join(f"```\n{text}\n```" for text in texts), step)

    def _writer(self, step: int) -> Any:
        """Return the writer, which is opened with the first step that is written."""
        if self._run is None:
            # A resumed run first writes the step after its checkpoint, whose number is that of the checkpoint's
            # evaluation. The evaluation is not written again, so it must not be dropped.
            self._options = {"purge_step": step + 1 if step else 0}
        return self._service_run


@tracker("trackio", extra=("trackio", "trackio"))
class Trackio(_Service):
    """Log to trackio, on this machine or in a Hugging Face Space.

    trackio knows a run by its name, which therefore ends with the first letters of the run's id.

    Args:
        project: project of the run.
        name: begin of the run's name; by default the name of the run directory.
        group: group of runs.
        space_id: the Hugging Face Space to log to; if unset, data stays on this machine.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str = "retrain",
        name: str | None = None,
        group: str | None = None,
        space_id: str | None = None,
    ) -> None:
        super().__init__(run_dir, project=project, name=name or run_dir.name, group=group, space_id=space_id)

    def _location(self) -> str:
        space, project = self._options["space_id"], self._options["project"]
        return f"https://huggingface.co/spaces/{space}" if space else f"trackio show --project {project}"

    def _connect(self, *, name: str, **options: Any) -> Any:
        import trackio  # pyright: ignore[reportMissingImports]

        options["name"] = f"{name}-{run_id(self._run_dir)[:_ID_LETTERS]}"
        return trackio.init(**options, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def log(self, step: int, metrics: Mapping[str, Any]) -> None:
        """Send the finite metrics of a step."""
        self._service_run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)

    def _send_table(self, step: int, columns: list[str], data: list[list[Any]]) -> None:
        import trackio  # pyright: ignore[reportMissingImports]

        self._service_run.log({"completions": trackio.Table(columns=columns, data=data)}, step=step)


def run_id(run_dir: Path) -> str:
    """Return the run's id for services. It is created at the first start and stays the same when the run resumes."""
    file = run_dir / "run_id"
    if not file.is_file():
        write_text(file, uuid4().hex)
    return file.read_text(encoding="utf-8")


def stored_config(run_dir: Path) -> dict[str, Any]:
    """Return the run's resolved configuration, with values that look secret masked."""
    file = run_dir / "config.resolved.json"
    return masked(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _wandb_key() -> bool:
    """Return whether WANDB_API_KEY or a netrc entry has a key for wandb."""
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY")) or netrc.netrc().authenticators("api.wandb.ai") is not None
    return False
