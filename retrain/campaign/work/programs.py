"""What a campaign starts besides runs: `python -m retrain.campaign.work.programs NAME ARGUMENT...`."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.campaign_worker import Worker
from retrain.config.load import load
from retrain.errors import Preempted, RetrainError
from retrain.system.process import follower
from retrain.system.terminal import say

_POLL_S = 0.2
_TAIL = 2000


def ray_task(folder: str, directory: str, job: str, cpus: int) -> tuple[int, str]:
    """Do one run, wherever Ray executes this; `ray.cancel` lets it save first.

    The worker for it gets a process of its own: a worker's signal handlers and its way to start runs need a process
    with one thread, and Ray's has many.

    Args:
        folder: current directory of the run, as in the process that started the campaign.
        directory: absolute path of the campaign.
        job: id of the run.
        cpus: its threads.
    Returns:
        Exit code of its worker, and the end of what this one printed. How the run ended is in its outcome.json.
    """
    command = [sys.executable, "-m", __name__, "one-run", directory, job, str(cpus), str(os.getpid())]
    with tempfile.TemporaryFile() as printed:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=printed, stderr=printed, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # the form in which a cancellation arrives
            process.terminate()
            process.wait()
        printed.seek(0)
        return process.returncode, printed.read().decode(errors="replace").strip()[-_TAIL:]


def one_run(directory: str, job: str, cpus: str, parent: str) -> None:
    """Work on the job if it is free, or becomes free soon; end when the process `parent` ends."""
    follower(int(parent), code=Preempted.exit_code)()
    campaign = CampaignDirectory(Path(directory))
    jobs = [one for one in campaign.jobs if one.id == job]
    Worker(campaign, jobs, [{"OMP_NUM_THREADS": cpus}], lambda event, details: None, limit=1).run()


def warm_start(config: str) -> None:
    """Compute the warm start of a run, unless it is in the cache, before all runs would wait for the first of them."""
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
