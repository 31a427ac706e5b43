"""SLURM job array of a campaign: each task is a worker that takes one run, or some if there are many."""

from __future__ import annotations

import math
import shlex
import sys
from pathlib import Path

from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.run_process import gpus
from retrain.run.launch import slurm_job

_ABOUT = """\
Campaign {name}: {runs} runs. Each task takes the next free run{several}. A failed node costs the steps since the
# run's last checkpoint. Submit this file again to resume the campaign."""
_MAX_TASKS = 1000
"""Largest number of tasks. SLURM refuses a task number beyond its MaxArraySize, which is 1001 by default."""


def slurm_script(campaign: CampaignDirectory, slots: int | None = None) -> str:
    """Return a script for `sbatch`; the user adapts its limits.

    Args:
        campaign: the campaign.
        slots: number of tasks at a time; None: all.
    """
    path = shlex.quote(str(Path.cwd() / campaign.path))
    name = campaign.path.resolve().name
    runs = len(campaign.jobs)
    each = math.ceil(runs / _MAX_TASKS)
    tasks = math.ceil(runs / each)
    several = f", {each} in turn, because SLURM arrays are limited to 1,001 tasks" if each > 1 else ""
    options = {
        "job-name": name,
        "array": f"0-{tasks - 1}%{slots or tasks}",
        "ntasks": 1,
        "cpus-per-task": 2 * campaign.plan.ranks,  # the run, and its reward workers
        **({"gres": f"gpu:{campaign.plan.ranks}"} if gpus() else {}),
        "signal": "B:TERM@120",  # seconds to finish a step and save
        "output": f"{path}/slurm-%A_%a.log",
    }
    return slurm_job(
        _ABOUT.format(name=name, runs=f"{runs:,}", several=several),
        options,
        f"{shlex.quote(sys.executable)} -m retrain worker {path} --slots 1 --limit {each} --plain",
        job="${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}",
        folder=campaign.plan.folder,
    )
