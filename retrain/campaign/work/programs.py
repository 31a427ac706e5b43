"""Programs that a campaign starts besides runs: `python -m retrain.campaign.work.programs NAME ARGUMENT...`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.campaign_worker import Worker
from retrain.config.load import load
from retrain.errors import Preempted, RetrainError
from retrain.system.process import follower, start
from retrain.system.terminal import say

_POLL_S = 0.2
_TAIL = 2000


def ray_task(folder: str, directory: str, job: str, cpus: int) -> tuple[int, str]:
    """Execute one run inside a Ray task; after `ray.cancel` the run saves before it ends.

    The campaign worker runs in its own process: its signal handlers and its way of starting runs need a process with
    one thread, and a Ray worker has many.

    Args:
        folder: current directory of the process that started the campaign.
        directory: absolute path of the campaign.
        job: id of the job.
        cpus: number of threads of the run.
    Returns:
        (exit code of the campaign worker, the last 2,000 characters of its output). The outcome of the run is in
        its outcome.json.
    """
    command = [sys.executable, "-m", __name__, "one-run", directory, job, str(cpus), str(os.getpid())]
    with tempfile.TemporaryFile() as printed:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": printed, "stderr": printed}
        process = start(command, follow=None, cwd=folder, **streams)  # `one_run` follows this process itself
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # Ray delivers a cancellation as KeyboardInterrupt
            process.terminate()
            process.wait()
        printed.seek(0)
        return process.returncode, printed.read().decode(errors="replace").strip()[-_TAIL:]


def one_run(directory: str, job: str, cpus: str, parent: str) -> None:
    """Work on the job if its lease is free or becomes free soon; end when the process `parent` ends."""
    follower(int(parent), code=Preempted.exit_code)()
    campaign = CampaignDirectory(Path(directory))
    chosen = [candidate for candidate in campaign.jobs if candidate.id == job]
    Worker(campaign, chosen, [{"OMP_NUM_THREADS": cpus}], lambda event, details: None, limit=1).run()


def warm_start(config: str) -> None:
    """Compute the warm start of a run, unless it is in the cache.

    Without this, the runs that share it would start and wait for the first of them to compute it.
    """
    from retrain.run.build import choose_device, initial_model

    loaded = load(config)
    device = choose_device(loaded.config.training.device)
    initial_model(loaded, device, lambda event, details: say(" ".join(map(str, (event, *details.values())))))


if __name__ == "__main__":
    try:
        {"one-run": one_run, "warm-start": warm_start}[sys.argv[1]](*sys.argv[2:])
    except RetrainError as error:
        say(str(error), error=True)
        sys.exit(error.exit_code)
