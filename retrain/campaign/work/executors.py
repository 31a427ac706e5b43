"""How the runs of a campaign are executed. All of them keep their state in files, so any one goes on with any campaign.

An executor is a class, built with `campaign` (its directory), with `run(jobs, observe)`, which returns when every
job has an outcome. With the trait `here=True` runs share this machine's cache, and their warm start is computed first.
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


@executor("local", here=True)
class Local:
    """Processes on this machine; `retrain worker DIR` on others may join."""

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Work on the jobs, and wait for those that others work on."""
        slots = machine_slots(self._campaign.plan.slots, self._campaign.plan.ranks)
        Worker(self._campaign, jobs, slots, observe).run()


@executor("dir")
class Directory:
    """Workers elsewhere: `retrain worker DIR`, on any machine that sees the folder."""

    def __init__(self, campaign: CampaignDirectory) -> None:
        self._campaign = campaign

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Wait until the workers are done; they go on if this process is stopped."""
        observe("message", {"text": f"waiting for workers: retrain worker {self._campaign.path}", "level": "info"})
        with StopSignals() as signals:
            while signals.requested is None and any(not self._campaign.outcome(job) for job in jobs):
                observe("tick", {})
                time.sleep(_POLL_S)
            signals.end("no longer waiting; the workers go on")
