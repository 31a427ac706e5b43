"""`retrain campaign`: from a validated campaign to its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

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
    for index, job in enumerate(_distinct(loaded, jobs)):
        observe("message", {"text": "computing the warm start, unless it is in the cache", "level": "info"})
        with Stop():
            run_process.warm_start(campaign.run(job), campaign.path / f"warmstart-{index}.log")


def _distinct(loaded: LoadedCampaign, jobs: Sequence[Job]) -> list[Job]:
    """One job for each different warm start."""
    found: dict[str, Job] = {}
    configs = {condition.label: config for condition, config in zip(loaded.conditions, loaded.configs, strict=True)}
    for job in jobs:
        config = configs[job.condition]
        if config.config.warmup.steps and config.config.warmup.cache:
            facts = config.resolved()
            parts = [facts[name] for name in ("model", "warmup")] + [facts["components"]["task"]]
            found.setdefault(json.dumps(parts, sort_keys=True), job)
    return list(found.values())


def verdict(directory: Path) -> str:
    """Write the report of a campaign and return its verdict."""
    from retrain.campaign.verdict.campaign_page import write_report

    return write_report(directory).text
