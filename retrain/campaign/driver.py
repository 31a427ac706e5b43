"""`retrain campaign`: from a validated campaign to its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.work.campaign_directory import CampaignDirectory, Job, create
from retrain.campaign.work.run_process import start, warm_start_command
from retrain.run.stop_signal import Stop
from retrain.system.process import end
from retrain.types import Observer


def run_campaign(
    loaded: LoadedCampaign, observe: Observer, *, fresh: bool = False, retry_failed: bool = False
) -> CampaignDirectory:
    """Execute what is left to do of a campaign; finished runs are skipped.

    Args:
        observe: see `retrain.campaign.work.campaign_worker.Worker`; "message" and "campaign" (its path) besides.
        fresh: delete an earlier campaign of that name first.
        retry_failed: failed runs are taken up again.
    Raises:
        ConfigError, StorageError: the directory cannot be used.
        Preempted, KeyboardInterrupt: stopped; the same command goes on.
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

    It is none of a run's business if this fails: the run says why itself.
    """
    for index, job in enumerate(_distinct(loaded, jobs)):
        observe("message", {"text": "computing the warm start, unless it is in the cache", "level": "info"})
        log = campaign.path / f"warmstart-{index}.log"
        with Stop():
            process = start(warm_start_command(campaign.run(job)), log, {})
            try:
                process.wait()
            finally:
                end(process)


def _distinct(loaded: LoadedCampaign, jobs: Sequence[Job]) -> list[Job]:
    """One job for each warm start that there is to compute."""
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
