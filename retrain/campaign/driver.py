"""`retrain campaign`: from a validated campaign to its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work import run_process
from retrain.campaign.work.campaign_directory import CampaignDirectory, create
from retrain.run.stop_signal import Stop
from retrain.types import Observer


def run_campaign(
    loaded: LoadedCampaign, observe: Observer, *, fresh: bool = False, retry_failed: bool = False
) -> CampaignDirectory:
    """Execute what is left to do of a campaign; finished runs are skipped.

    Args:
        observe: see `retrain.campaign.work.campaign_worker.Worker`; also "message" and "campaign" (its path).
        fresh: delete an earlier campaign of that name first.
        retry_failed: run failed runs again, from their checkpoints.
    Raises:
        ConfigError, StorageError: the directory cannot be used.
        Preempted, KeyboardInterrupt: stopped; the same command continues.
    """
    campaign = create(loaded, fresh)
    if retry_failed:
        campaign.forget_failures()
    observe("campaign", {"path": campaign.path})
    pending = campaign.pending()
    if len(pending) < len(campaign.jobs):
        text = f"{len(campaign.jobs) - len(pending)} of {len(campaign.jobs)} runs have ended before"
        observe("message", {"text": text, "level": "info"})
    if pending and loaded.executor.component.traits.get("here"):
        warm_start(loaded, campaign, pending, observe)
    if pending:
        loaded.executor.build({"campaign": campaign}).run(pending, observe)
    return campaign


def failed(campaign: CampaignDirectory) -> bool:
    """Whether a run of the campaign has no result."""
    return any(campaign.outcome(job).get("status") != "done" for job in campaign.jobs)


def warm_start(loaded: LoadedCampaign, campaign: CampaignDirectory, jobs: Sequence[Job], observe: Observer) -> None:
    """Compute each warm start that the jobs share, once, into the cache.

    If this fails, the runs fail as well, and say why.
    """
    distinct: dict[str, Job] = {}
    configs = {condition.label: config for condition, config in zip(loaded.conditions, loaded.configs, strict=True)}
    for job in jobs:
        warmup, facts = configs[job.condition].config.warmup, configs[job.condition].resolved()
        if warmup.steps and warmup.cache:
            parts = (facts["model"], facts["warmup"], facts["components"]["task"])
            distinct.setdefault(json.dumps(parts, sort_keys=True), job)
    for index, job in enumerate(distinct.values()):
        observe("message", {"text": "computing the warm start, unless it is in the cache", "level": "info"})
        with Stop():
            run_process.finish(run_process.warm_start(campaign.run(job), campaign.path / f"warmstart-{index}.log"))
