"""wandb, TensorBoard and trackio.

Each connects at the first row, not when it is built: with a `Guard` around it, a service that is down
costs a warning. What is sent are the metrics and the resolved configuration; the command line, the
environment, source files and the console are not.
"""

from __future__ import annotations

import json
import math
import netrc
import os
from abc import abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from retrain.protocols import Tracker
from retrain.registry import tracker
from retrain.system.secret_names import masked


class _Service(Tracker):
    """A tracker whose library opens a run, with the resolved configuration, and sends rows to it."""

    def __init__(self, run_dir: Path, **options: Any) -> None:
        self._run_dir, self._options, self._run = run_dir, options, None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Send the metrics of a step."""
        if self._run is None:
            self._run: Any = self._connect(config=stored_config(self._run_dir), **self._options)
        self._send(step, metrics)

    def close(self) -> None:
        """Finish the run."""
        if self._run is not None:
            self._run.finish()

    @abstractmethod
    def _connect(self, **options: Any) -> Any: ...

    @abstractmethod
    def _send(self, step: int, metrics: Mapping[str, float]) -> None: ...


@tracker("wandb")
class Wandb(_Service):
    """Weights & Biases; works offline, into the run directory, where there is no key.

    Args:
        project: project of the run.
        name: name of the run; unset: that of the run directory.
        group: runs that belong together, such as one condition of a campaign.
        tags: labels of the run.
        mode: "auto" is online where WANDB_API_KEY or a netrc entry gives a key, otherwise offline.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        project: str = "retrain",
        name: str | None = None,
        group: str | None = None,
        tags: list[str] = [],  # noqa: B006 - never changed; a TOML array
        mode: Literal["auto", "online", "offline"] = "auto",
    ) -> None:
        super().__init__(run_dir, project=project, name=name or run_dir.name, group=group, tags=tags, mode=mode)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({**metrics, "step": step})

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
        run: Any = wandb.init(dir=self._run_dir, mode=mode, settings=settings, **options)
        # Evaluations and steps share one axis, and a resumed run may log a step again.
        run.define_metric("*", step_metric="step")
        return run


@tracker("tensorboard", extra=("tensorboard", "tensorboard"))
class Tensorboard(Tracker):
    """TensorBoard event files in `tensorboard/` of the run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._folder, self._writer = run_dir / "tensorboard", None

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a scalar per metric."""
        if self._writer is None:
            from torch.utils.tensorboard import SummaryWriter

            self._writer: Any = SummaryWriter(str(self._folder))
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush the event file."""
        if self._writer is not None:
            self._writer.close()


@tracker("trackio", extra=("trackio", "trackio"))
class Trackio(_Service):
    """trackio: local dashboards, or a Space.

    Args:
        project: project of the run.
        name: name of the run; unset: that of the run directory.
        group: runs that belong together.
        space_id: a Hugging Face Space to send to; unset: stay on this machine.
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

    def _connect(self, **options: Any) -> Any:
        import trackio  # pyright: ignore[reportMissingImports]

        return trackio.init(**options, resume="allow", embed=False, auto_log_gpu=False, auto_log_cpu=False)

    def _send(self, step: int, metrics: Mapping[str, float]) -> None:
        self._run.log({name: value for name, value in metrics.items() if math.isfinite(value)}, step=step)


def stored_config(run_dir: Path) -> dict[str, Any]:
    """The run's resolved configuration, without values that look secret."""
    file = run_dir / "config.resolved.json"
    return masked(json.loads(file.read_text(encoding="utf-8"))) if file.is_file() else {}


def _wandb_key() -> bool:
    """Whether a key is at hand; its value is left to wandb."""
    with suppress(OSError, netrc.NetrcParseError):
        return bool(os.environ.get("WANDB_API_KEY")) or netrc.netrc().authenticators("api.wandb.ai") is not None
    return False
