"""A campaign worker: takes jobs, runs as many at a time as it has slots, and ends when no job is left.

A worker has one thread, which starts runs, polls them, renews leases, and updates the display in turn.
"""

from __future__ import annotations

import math
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.lease import LEASE_S, Lease, LeaseWatch
from retrain.campaign.work.run_process import checked_code, crashed, evict, gpus, reason, train
from retrain.errors import ConfigError, Preempted, RetrainError, StorageError
from retrain.report.run_page import write_report
from retrain.system.lock import machine
from retrain.system.process import Process, SignalHandler, end, usable_cores
from retrain.types import Observer

_POLL_S = 0.1
_SCAN_S = 1.0  # every scan reads the outcome and the lease of all jobs, which may be on a network disk
_BEAT_S = LEASE_S / 6


class StopSignals(SignalHandler):
    """Record SIGINT and SIGTERM, so that the worker can let its runs save before it stops.

    Attributes:
        requested: number of the first signal; None until one arrives.
        urgent: a second signal arrived, so runs are ended without waiting.
    """

    numbers = (signal.SIGINT, signal.SIGTERM)

    def __init__(self) -> None:
        self.requested: int | None = None
        self.urgent = False

    def receive(self, number: int) -> None:
        """Record a signal."""
        self.urgent = self.requested is not None
        self.requested = self.requested or number

    def end(self, text: str) -> None:
        """Raise KeyboardInterrupt (exit code 130) after SIGINT, Preempted (75) after SIGTERM, else nothing."""
        if self.requested == signal.SIGINT:
            raise KeyboardInterrupt
        if self.requested is not None:
            raise Preempted(text)


@dataclass
class Running:
    """A job that this worker is running; `slot` is -1 after its run received SIGTERM."""

    job: Job
    lease: Lease
    slot: int
    process: Process
    began: float = field(default_factory=time.monotonic)


class Worker:
    """Runs jobs in the slots of this machine.

    Args:
        campaign: the campaign of the jobs.
        jobs: jobs to work on, in order.
        slots: environment variables of each slot.
        observe: called with "job" (id, event, text) when a job starts or ends, and with "tick" several times a second.
        limit: largest number of jobs to take. None: take all, and wait for the jobs of other workers, to take them
            over if those workers die.

    Attributes:
        failures: number of jobs that failed in this worker.
        limit: number of jobs that it may still take; None: all.
    """

    def __init__(
        self,
        campaign: CampaignDirectory,
        jobs: Sequence[Job],
        slots: Sequence[Mapping[str, str]],
        observe: Observer,
        limit: int | None = None,
    ) -> None:
        self._campaign = campaign
        self._slots = slots
        self._observe = observe
        self._left = list(jobs)
        self.limit = limit
        self._retries = campaign.plan.retries
        self._watch = LeaseWatch(campaign.path / "leases")
        self._running: list[Running] = []
        self.failures = 0
        self._beaten = -math.inf
        self._scanned = -math.inf
        self._began = time.monotonic()

    def run(self) -> None:
        """Work until every job has an outcome or the limit is reached; `failures` counts failures of this worker.

        Raises:
            Preempted, KeyboardInterrupt: a signal arrived; the runs have saved, and their leases are released.
            StorageError: the campaign's directory cannot be written; the runs have saved, if they could.
        """
        with StopSignals() as signals:
            try:
                while self._step(signals):
                    self._observe("tick", {})
                    time.sleep(_POLL_S)
            except StorageError:
                self._give_up(signals)
                raise
            finally:
                for running in self._running:
                    end(running.process)
            signals.end("stopped; the runs have saved")

    def _give_up(self, signals: StopSignals) -> None:
        """Let the runs save and end, and release the leases that can still be written."""
        self._stop(urgent=False)
        while any(running.process.poll() is None for running in self._running) and not signals.urgent:
            time.sleep(_POLL_S)
        for running in self._running:
            with suppress(StorageError):
                running.lease.release()

    def _step(self, signals: StopSignals) -> bool:
        """Poll runs, renew leases and fill free slots; return False when there is nothing more to do."""
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
        # With a limit, wait only long enough to see whether other workers renew their leases.
        wait = self.limit is None or (self.limit > 0 and time.monotonic() - self._began < 2 * LEASE_S)
        return bool(self._running) or (bool(self._left) and wait)

    def _stop(self, urgent: bool) -> None:
        """Send each run SIGTERM, so that it saves and stops; after a second signal, kill it."""
        for running in self._running:
            if urgent:
                end(running.process)
            elif running.slot >= 0:
                running.process.terminate()
                running.slot = -1

    def _beat(self) -> None:
        """Renew the leases, and end runs whose lease another worker has taken over."""
        now = time.monotonic()
        if now - self._beaten < _BEAT_S:
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
            if len(self._running) == len(self._slots) or self.limit == 0:
                return
            lease = None if job.id in busy else self._watch.take(job.id, self._campaign.run(job) / "metrics.jsonl")
            if lease is not None and self._campaign.outcome(job):
                lease.release()  # another worker finished the job between the check above and `take`
            elif lease is not None:
                self.limit = None if self.limit is None else self.limit - 1
                free = set(range(len(self._slots))) - {running.slot for running in self._running}
                self._start(job, lease, min(free))

    def _start(self, job: Job, lease: Lease, slot: int) -> None:
        run = self._campaign.run(job)
        evict(run, lease.previous)
        process = train(run, self._campaign.plan.ranks, self._slots[slot])
        lease.beat(starts=lease.facts["starts"] + 1, child={"machine": machine(), "pid": process.pid})
        self._running.append(Running(job, lease, slot, process))
        self._report(job, "started", "" if lease.facts["starts"] == 1 else f"start {lease.facts['starts']}")

    def _ended(self, running: Running, code: int, stopping: bool) -> None:
        """Write the outcome of a run, restart it after a crash, or release its lease."""
        end(running.process)  # also ends remaining processes of its group
        self._running.remove(running)
        self._scanned = -math.inf  # its slot is free
        job = running.job
        lease = running.lease
        if not lease.owned():
            lease.close()
            self._report(job, "lost", "another worker has taken it over")
            return
        code = checked_code(self._campaign.run(job), code)
        lease.facts["seconds"] = round(lease.facts["seconds"] + time.monotonic() - running.began, 3)
        if code != 0 and stopping:
            lease.release()
            self._report(job, "stopped", "")
        elif crashed(code) and lease.facts["crashes"] < self._retries:
            lease.facts["crashes"] += 1
            self._report(job, "crashed", reason(self._campaign.run(job), code))
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
                self._report(job, str(outcome["status"]), str(outcome["reason"]))
                with suppress(RetrainError, OSError):  # a run that failed early may have no step
                    write_report(self._campaign.run(job))
            self._campaign.trim(job)
            lease.close()

    def _report(self, job: Job, event: str, text: str) -> None:
        self._observe("job", {"id": job.id, "event": event, "text": text})


def machine_slots(wanted: int | str, ranks: int = 1, most: int | None = None) -> list[dict[str, str]]:
    """Return the environment variables of each slot of this machine: its GPUs, and CPU threads per rank.

    Args:
        wanted: number of slots. "auto": one per `ranks` GPUs, or one per `ranks` cores if there is no GPU.
        ranks: processes of one run, each with a GPU.
        most: number of GPUs to use; None: all.
    Raises:
        ConfigError: a run has more ranks than this machine has GPUs.
    """
    cores = usable_cores()
    devices = gpus()[:most]
    if 0 < len(devices) < ranks:
        problem = f"runs of {ranks} ranks need {ranks} GPUs each, and this machine has {len(devices)}"
        fix = "lower [campaign] ranks, or use a machine with more GPUs"
        raise ConfigError.at("campaign", "ranks", problem, fix)
    groups = [",".join(devices[first : first + ranks]) for first in range(0, len(devices) - ranks + 1, ranks)]
    count = (len(groups) or max(1, cores // ranks)) if wanted == "auto" else int(wanted)
    # On a CPU the number of threads changes rounding and so the result of a run. It is fixed at 1, so that the result
    # does not depend on the number of slots.
    threads = {"OMP_NUM_THREADS": str(max(1, cores // (count * ranks)) if groups else 1)}
    return [threads | ({"CUDA_VISIBLE_DEVICES": groups[slot % len(groups)]} if groups else {}) for slot in range(count)]
