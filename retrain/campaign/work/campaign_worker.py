"""One worker: takes jobs of a campaign one after the other, as many at a time as it has slots, until none is left.

A worker has one thread. It starts runs, looks after them, keeps its leases alive, and draws the display in turn.
"""

from __future__ import annotations

import signal
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.lease import Lease, LeaseWatch
from retrain.campaign.work.run_process import crashed, evict, gpus, reason, train
from retrain.errors import ConfigError, ConfigProblem, Preempted
from retrain.system.process import Process, SignalHandler, end, usable_cores
from retrain.types import Observer

_POLL_S = 0.1
_SCAN_S = 1.0
_BEATS = 6  # per lease


class StopSignals(SignalHandler):
    """Ctrl-C and SIGTERM, remembered; the second one gives up waiting.

    Attributes:
        requested: what arrived first; None before.
        urgent: it came twice.
    """

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: int | None = None
        self.urgent = False

    def receive(self, number: int) -> None:
        """Remember the signal."""
        self.urgent = self.requested is not None
        self.requested = self.requested or number

    def end(self, text: str) -> None:
        """Raise what the signal means for the exit code, if one came: 130 or 75."""
        if self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is not None:
            raise Preempted(text)


@dataclass
class Running:
    """A job that is being run here."""

    job: Job
    lease: Lease
    slot: int
    process: Process
    began: float = field(default_factory=time.monotonic)


class Worker:
    """Runs jobs in the slots of this machine.

    Args:
        campaign: whose jobs.
        jobs: those to work on, in order.
        slots: environment variables of each slot.
        observe: called with "job" (id, event, text) when one starts or ends, and with "tick" several times a second.
        limit: jobs to take; None takes all, and waits for those that others hold, to take them over if they die.
    """

    def __init__(
        self,
        campaign: CampaignDirectory,
        jobs: Sequence[Job],
        slots: Sequence[Mapping[str, str]],
        observe: Observer,
        limit: int | None = None,
    ) -> None:
        self._campaign, self._slots, self._observe = campaign, slots, observe
        self._left, self._limit = list(jobs), limit
        self._lease_s, self._retries = campaign.plan.lease_s, campaign.plan.retries
        self._watch = LeaseWatch(campaign.path / "leases", self._lease_s)
        self._running: list[Running] = []
        self.failures = 0
        self._beaten = self._scanned = -1e9
        self._began = time.monotonic()

    def run(self) -> None:
        """Work until every job has an outcome, or the limit is reached; `failures` counts those that failed here.

        Raises:
            Preempted, KeyboardInterrupt: a signal came; the runs have saved, and their leases are free.
        """
        with StopSignals() as signals:
            try:
                while self._step(signals):
                    self._observe("tick", {})
                    time.sleep(_POLL_S)
            finally:
                for running in self._running:
                    end(running.process)
            signals.end(f"stopped with {len(self._left)} runs to do; the same command continues")

    def _step(self, signals: StopSignals) -> bool:
        """One look at everything; False when there is nothing more to do."""
        for running in list(self._running):
            code = running.process.poll()
            if code is not None:
                self._ended(running, code, stopping=signals.requested is not None)
        self._beat()
        if signals.requested is not None:
            self._stop(signals.urgent)
            return bool(self._running)
        if len(self._running) < len(self._slots) and time.monotonic() - self._scanned > _SCAN_S:
            self._fill()
        # With a limit, wait no longer than it takes to see that the others' leases are alive.
        wait = self._limit is None or (self._limit > 0 and time.monotonic() - self._began < 2 * self._lease_s)
        return bool(self._running) or (bool(self._left) and wait)

    def _stop(self, urgent: bool) -> None:
        """Ask every run to save and end; the second time, end it."""
        for running in self._running:
            if urgent:
                end(running.process)
            elif running.slot >= 0:
                running.process.terminate()
                running.slot = -1

    def _beat(self) -> None:
        """Show that the leases are alive, and end runs whose lease another worker has taken over."""
        now = time.monotonic()
        if now - self._beaten < self._lease_s / _BEATS:
            return
        self._beaten = now
        for running in list(self._running):
            if running.lease.owned():
                running.lease.beat()
            else:
                self._ended(running, 0, stopping=False)

    def _fill(self) -> None:
        """Take jobs for the free slots."""
        self._scanned = time.monotonic()
        busy = {running.job.id for running in self._running}
        self._left = [job for job in self._left if not self._campaign.outcome(job)]
        for job in self._left:
            if len(self._running) == len(self._slots) or self._limit == 0:
                return
            lease = None if job.id in busy else self._watch.take(job.id, self._campaign.run(job) / "metrics.jsonl")
            if lease is not None and self._campaign.outcome(job):
                lease.release()  # it ended between the look at its outcome and the lease
            elif lease is not None:
                self._limit = None if self._limit is None else self._limit - 1
                free = set(range(len(self._slots))) - {running.slot for running in self._running}
                self._start(job, lease, min(free))

    def _start(self, job: Job, lease: Lease, slot: int) -> None:
        run = self._campaign.run(job)
        evict(run, lease.previous)
        process = train(run, self._campaign.plan.ranks, self._slots[slot])
        lease.beat(starts=lease.facts["starts"] + 1, child={"host": socket.gethostname(), "pid": process.pid})
        self._running.append(Running(job, lease, slot, process))
        self._tell(job, "started", "" if lease.facts["starts"] == 1 else f"start {lease.facts['starts']}")

    def _ended(self, running: Running, code: int, stopping: bool) -> None:
        """Write the outcome of a run, start it again, or leave it to others."""
        end(running.process)  # also what it left behind in its process group
        self._running.remove(running)
        self._scanned = -1e9  # its slot is free
        job, lease = running.job, running.lease
        if not lease.owned():
            lease.close()
            self._tell(job, "lost", "another worker has taken it over")
            return
        lease.facts["seconds"] = round(lease.facts["seconds"] + time.monotonic() - running.began, 3)
        if code != 0 and stopping:
            lease.release()
            self._tell(job, "stopped", "")
        elif crashed(code) and lease.facts["crashes"] < self._retries:
            lease.facts["crashes"] += 1
            self._tell(job, "crashed", reason(self._campaign.run(job), code))
            lease.previous = lease.facts
            self._start(job, lease, running.slot)
        else:
            outcome = {
                "status": "failed" if code else "done",
                "exit_code": code if code >= 0 else 128 - code,
                "attempts": lease.facts["starts"],
                "seconds": lease.facts["seconds"],
                "reason": reason(self._campaign.run(job), code) if code else "",
                "host": socket.gethostname(),
            }
            self.failures += code != 0
            if self._campaign.finish(job, outcome):
                self._tell(job, str(outcome["status"]), str(outcome["reason"]))
            lease.close()

    def _tell(self, job: Job, event: str, text: str) -> None:
        self._observe("job", {"id": job.id, "event": event, "text": text})


def machine_slots(wanted: int | str, ranks: int = 1, most: int | None = None) -> list[dict[str, str]]:
    """Environment variables of each slot of this machine: its GPUs, and the CPU threads of each of its ranks.

    Args:
        wanted: how many, or "auto": one per `ranks` GPUs, or per so many cores where there is no GPU.
        ranks: processes of one run, each with a GPU. most: GPUs to use; None: all.
    Raises:
        ConfigError: a run has more ranks than this machine has GPUs.
    """
    cores, devices = usable_cores(), gpus()[:most]
    if 0 < len(devices) < ranks:
        problem, fix = f"there are {len(devices)} GPUs here for runs of {ranks} ranks", "take another machine"
        raise ConfigError([ConfigProblem("campaign", 0, 0, "ranks", problem, fix)])
    groups = [",".join(devices[first : first + ranks]) for first in range(0, len(devices) - ranks + 1, ranks)]
    count = (len(groups) or max(1, cores // ranks)) if wanted == "auto" else int(wanted)
    # Without a GPU what a run computes depends on its threads, and must not on how many slots its worker has.
    threads = {"OMP_NUM_THREADS": str(max(1, cores // (count * ranks)) if groups else 1)}
    return [threads | ({"CUDA_VISIBLE_DEVICES": groups[slot % len(groups)]} if groups else {}) for slot in range(count)]
