"""`retrain campaign`: from a validated campaign to its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack

from retrain import registry
from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work import run_process
from retrain.campaign.work.campaign_directory import CampaignDirectory, create
from retrain.campaign.work.campaign_worker import machine_slots
from retrain.run.stop_signal import Stop
from retrain.system.process import Process, end
from retrain.types import Observer


def run_campaign(
    loaded: LoadedCampaign, observe: Observer, *, fresh: bool = False, retry_failed: bool = False
) -> CampaignDirectory:
    """Execute the runs of a campaign that have no outcome yet.

    Args:
        loaded: the campaign.
        observe: receives the events of `retrain.campaign.work.campaign_worker.Worker`, and also "message" (text,
            level) and "campaign" (path).
        fresh: delete an earlier campaign of the same name first.
        retry_failed: resume failed runs from their checkpoints.
    Raises:
        ConfigError: the directory is not a campaign, or its runs were started with another configuration.
        StorageError: the directory cannot be read or written.
        Preempted, KeyboardInterrupt: a signal stopped the campaign; running the same command resumes it.
    """
    campaign = create(loaded, fresh)
    if retry_failed:
        campaign.forget_failures()
    for job in campaign.jobs:  # a worker may have died after writing an outcome and before deleting the files
        campaign.trim(job)
    observe("campaign", {"path": campaign.path})
    pending = campaign.pending()
    if len(pending) < len(campaign.jobs):
        text = f"{len(campaign.jobs) - len(pending)} of {len(campaign.jobs)} runs had already ended"
        observe("message", {"text": text, "level": "info"})
    if pending and registry.executor.traits_of(loaded.executor.component).local:
        warm_start(loaded, campaign, pending, observe)
    if pending:
        loaded.executor.build({"campaign": campaign}).run(pending, observe)
    return campaign


def failed(campaign: CampaignDirectory) -> bool:
    """Return True if at least one run of the campaign failed or has not ended."""
    return any(campaign.outcome(job).get("status") != "done" for job in campaign.jobs)


def warm_start(loaded: LoadedCampaign, campaign: CampaignDirectory, jobs: Sequence[Job], observe: Observer) -> None:
    """Compute each distinct warm start of the jobs once, as many at a time as there are slots; they go into the cache.

    A failure is ignored here: the runs compute the warm start themselves, fail as well, and record the reason.
    """
    distinct: dict[str, Job] = {}
    configs = {condition.label: config for condition, config in zip(loaded.conditions, loaded.configs, strict=True)}
    for job in jobs:
        warmup, facts = configs[job.condition].config.warmup, configs[job.condition].resolved()
        if warmup.steps and warmup.cache:
            parts = (loaded.settings.start(job.seed), facts["model"], facts["warmup"], facts["components"]["task"])
            distinct.setdefault(json.dumps(parts, sort_keys=True), job)
    runs = [campaign.run(job) for job in distinct.values()]
    if runs:
        text = f"computing {len(runs)} warm start{'s' * (len(runs) > 1)}, unless in the cache"
        observe("message", {"text": text, "level": "info"})
    slots = machine_slots(campaign.plan.slots, campaign.plan.ranks) if len(runs) > 1 else [{}]
    for first in range(0, len(runs), len(slots)):
        with Stop("run the same command to resume"), ExitStack() as started:
            processes = list[Process]()
            for index, (run, environment) in enumerate(zip(runs[first:], slots, strict=False), start=first):
                log = campaign.path / f"warmstart-{index}.log"
                processes.append(run_process.warm_start(run, log, environment))
                started.callback(end, processes[-1])
            for process in processes:
                process.wait()
