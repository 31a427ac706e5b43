"""A SLURM array script: every task is a worker that takes one run."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path

from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.run_process import gpus
from retrain.run.launch import requeued

_SCRIPT = """\
#!/bin/bash
# Campaign {name}: one task per run. A task takes whichever run is free, so that a failed node costs one run's
# steps since its last checkpoint, and submitting this file again goes on with what is left to do.
#SBATCH --job-name={name}
#SBATCH --array=0-{last}%{slots}
#SBATCH --ntasks=1
#SBATCH --cpus-per-task={cpus}
{gpu}#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:TERM@120
#SBATCH --output={path}/slurm-%A_%a.log

cd {folder}
{requeued}
"""


def slurm_script(campaign: CampaignDirectory, slots: int | None = None) -> str:
    """The script for `sbatch`; its limits are for the user to adapt.

    Args:
        slots: tasks at a time; unset: all.
    """
    path = shlex.quote(str(Path.cwd() / campaign.path))
    command = f"{shlex.quote(sys.executable)} -m retrain.cli.main worker {path} --slots 1 --limit 1 --plain"
    return _SCRIPT.format(
        name=campaign.path.resolve().name,
        last=len(campaign.jobs) - 1,
        slots=slots or len(campaign.jobs),
        cpus=2 * campaign.plan.ranks,
        gpu=f"#SBATCH --gres=gpu:{campaign.plan.ranks}\n" if gpus() else "",
        folder=shlex.quote(campaign.plan.folder),
        path=path,
        requeued=requeued(command, "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}"),
    )
