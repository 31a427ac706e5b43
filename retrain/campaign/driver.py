"""`retrain campaign`: from a validated campaign to its verdict."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from retrain import registry
from retrain.campaign.plan.load_campaign import LoadedCampaign
from retrain.campaign.plan.plan_file import Job
from retrain.campaign.schedule import Schedule
from retrain.campaign.work import run_process
from retrain.campaign.work.campaign_directory import CampaignDirectory, create
from retrain.campaign.work.campaign_worker import Worker, machine_slots
from retrain.errors import Preempted
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
    schedule = Schedule(campaign)
    needed = schedule.needed()
    if ended := len(needed) - len(schedule.due()):
        text = f"{ended} of {len(needed)} runs had already ended"
        observe("message", {"text": text, "level": "info"})
    warmed = set[int]()
    while due := schedule.due():  # one round, or with looks one round for each
        cold = [job for job in due if loaded.settings.start(job.seed) not in warmed]
        # Machines of a cluster have caches of their own, which this process cannot fill.
        if cold and registry.executor.traits_of(loaded.executor).local:
            warm_start(loaded, campaign, cold, observe)
            warmed |= {loaded.settings.start(job.seed) for job in cold}
        loaded.executor.build({"campaign": campaign}).run(due, observe)
        if any(not campaign.outcome(job) for job in due):  # an executor of the user's own gave up
            break
        if look := schedule.sentence():
            observe("message", {"text": look, "level": "info"})
    return campaign


def work(
    directory: Path, observe: Observer, slots: int | None = None, most_gpus: int | None = None, limit: int | None = None
) -> bool:
    """Execute runs of a campaign on this machine, as one of its workers.

    Args:
        directory: directory of the campaign.
        observe: see `run_campaign`.
        slots: number of concurrent runs; None: that of the campaign.
        most_gpus: number of GPUs to use; None: all.
        limit: largest number of runs to start; None: work until the campaign has ended.
    Returns:
        True if a run of this worker, or without a limit any run of the campaign, failed.
    Raises:
        Preempted: with a limit, no run is free before the next look; a batch system starts the worker again.
    """
    campaign = CampaignDirectory(directory)
    observe("campaign", {"path": directory})
    environments = machine_slots(slots or campaign.plan.slots, campaign.plan.ranks, most_gpus)
    schedule = Schedule(campaign)
    failures = 0
    while (due := schedule.due()) and limit != 0:
        worker = Worker(campaign, due, environments, observe, limit)
        worker.run()
        failures += worker.failures
        if any(not campaign.outcome(job) for job in due):
            # A worker that took a run has done its part; one that took none must come back after the look.
            if worker.limit == limit and schedule.waits():
                raise Preempted("no run is free before the next look")
            break
        limit = worker.limit
    return failures > 0 or (limit is None and schedule.failed())


def warm_start(loaded: LoadedCampaign, campaign: CampaignDirectory, jobs: Sequence[Job], observe: Observer) -> None:
    """Compute each distinct warm start of the jobs once, as many at a time as there are slots; they go into the cache.

    A failure is ignored here: the runs compute the warm start themselves, fail as well, and record the reason.
    """
    distinct: dict[str, Job] = {}
    configs = {condition.label: config for condition, config in zip(loaded.conditions, loaded.configs, strict=True)}
    # Conditions that share model, task and warm-up share a warm start, so that each is computed once.
    for job in jobs:
        warmup = configs[job.condition].config.warmup
        facts = configs[job.condition].resolved()
        if warmup.steps:
            parts = (loaded.settings.start(job.seed), facts["model"], facts["warmup"], facts["components"]["task"])
            distinct.setdefault(json.dumps(parts, sort_keys=True), job)
    runs = [campaign.run(job) for job in distinct.values()]
    if runs:
        text = f"computing {len(runs)} warm start{'s' * (len(runs) > 1)}, unless in the cache"
        observe("message", {"text": text, "level": "info"})
    # A single warm start may use the whole machine.
    slots = machine_slots(campaign.plan.slots, campaign.plan.ranks) if len(runs) > 1 else [{}]
    for first in range(0, len(runs), len(slots)):
        with Stop("run the same command to resume") as stop, stop.at_once(), ExitStack() as started:
            processes = list[Process]()
            for index, (run, environment) in enumerate(zip(runs[first:], slots, strict=False), start=first):
                log = campaign.path / f"warmstart-{index}.log"
                processes.append(run_process.warm_start(run, log, environment))
                started.callback(end, processes[-1])
            for process in processes:
                process.wait()
