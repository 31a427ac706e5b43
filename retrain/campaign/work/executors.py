"""Executors of the runs of a campaign.

An executor is a class that is built with `campaign` (a `CampaignDirectory`) and has a method `run(jobs, observe)`,
which returns when every job has an outcome. All state is in files, so a campaign can be resumed with another executor.
With the trait `local=True` all runs share this machine's cache, and warm starts are computed before the first run.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.campaign_worker import StopSignals, Worker, machine_slots
from retrain.registry import executor
from retrain.types import Observer

_POLL_S = 1.0


@executor("local", local=True)
class Local:
    """Execute runs as processes on this machine; other machines can join with `retrain worker DIR`."""

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Work on the jobs, and wait for jobs that other workers hold."""
        slots = machine_slots(self._campaign.plan.slots, self._campaign.plan.ranks)
        Worker(self._campaign, jobs, slots, observe).run()


@executor("dir")
class Directory:
    """Leave the runs to separate workers: `retrain worker DIR` on any machine that shares the directory."""

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Wait until every job has an outcome; the workers continue if this process is stopped."""
        observe("message", {"text": f"waiting for workers: retrain worker {self._campaign.path}", "level": "info"})
        with StopSignals() as signals:
            while signals.requested is None and any(not self._campaign.outcome(job) for job in jobs):
                observe("tick", {})
                time.sleep(_POLL_S)
            signals.end("stopped waiting; the workers continue")
