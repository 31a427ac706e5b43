"""One run of a campaign as a Ray task: a worker for this run alone, in a process of its own.

The Ray worker has threads and signal handlers; ours must have neither, to start runs and to let them save.
`python -m retrain.campaign.work.ray_task DIR JOB CPUS PARENT` is that process.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from os import getpid
from pathlib import Path

from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.campaign_worker import Worker
from retrain.errors import Preempted, RetrainError
from retrain.system.process import follower

_POLL_S = 0.2
_TAIL = 2000


def work(folder: str, directory: str, job: str, cpus: int) -> tuple[int, str]:
    """Do one run, wherever Ray executes this; `ray.cancel` lets it save first.

    Args:
        folder: current directory of the run, as in the process that started the campaign.
        directory: absolute path of the campaign.
        job: id of the run.
        cpus: its threads.
    Returns:
        Exit code of its worker, and the last that this one said. How the run ended is in its outcome.json.
    """
    command = [
        sys.executable,
        "-m",
        "retrain.campaign.work.ray_task",
        directory,
        job,
        str(cpus),
        str(getpid()),
    ]
    with tempfile.TemporaryFile() as said:
        process = subprocess.Popen(  # noqa: S603 - our own command
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            while process.poll() is None:
                time.sleep(_POLL_S)
        except KeyboardInterrupt:  # the form in which a cancellation arrives
            process.terminate()
            process.wait()
        said.seek(0)
        return process.returncode, said.read().decode(errors="replace").strip()[-_TAIL:]


def main(directory: str, job: str, cpus: str, parent: str) -> None:
    """Work on the job if it is free, or becomes so soon; end as the Ray worker ends."""
    follower(int(parent), code=Preempted.exit_code)()
    campaign = CampaignDirectory(Path(directory))
    jobs = [one for one in campaign.jobs if one.id == job]
    Worker(campaign, jobs, [{"OMP_NUM_THREADS": cpus}], lambda event, details: None, limit=1).run()


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except RetrainError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)
