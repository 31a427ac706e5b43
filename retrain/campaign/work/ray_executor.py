"""Runs of a campaign as tasks of an existing Ray cluster with token authentication.

Ray only chooses the node of each run. Leases and outcomes are files, as with every executor.
"""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from importlib import import_module
from typing import Annotated, Any

from pydantic import Field

from retrain.campaign.plan.plan_file import Job
from retrain.campaign.work.campaign_directory import CampaignDirectory
from retrain.campaign.work.campaign_worker import StopSignals
from retrain.campaign.work.lease import held
from retrain.errors import ConfigError, Preempted, StorageError
from retrain.registry import executor
from retrain.system.process import end, start
from retrain.types import Observer

_POLL_S = 1.0
_REACH_S = 10.0  # longest wait for a connection to the head node, which Ray itself would extend to minutes
_PROBE = "import sys, ray; ray.init(address=sys.argv[1], log_to_driver=False)"
_LOSSES = 10  # a run that is lost so often is lost by its own doing, such as by taking the node's memory
_STOPPED = (Preempted.exit_code, 130)
_TOKEN = "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"  # noqa: S105 - places, not a token


@executor("ray", extra=("ray", "ray"))
class RayCluster:
    """Execute each run as a task of a Ray cluster.

    Args:
        campaign: the campaign. Its directory and the current directory must have the same paths on every node.
        address: HOST:PORT of the cluster; "auto" uses RAY_ADDRESS, or the cluster to which this machine belongs.
        cpus_per_run: CPUs that Ray reserves for each rank; a rank uses as many threads.
        gpus_per_run: GPUs that Ray reserves for each rank. All ranks of a run are on one node and see only these GPUs.
    """

    def __init__(
        self,
        campaign: CampaignDirectory,
        *,
        address: Annotated[str, Field(pattern=r"^(auto|[^/\s]+:\d+)$")] = "auto",
        cpus_per_run: Annotated[int, Field(ge=1)] = 1,
        gpus_per_run: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._campaign = campaign
        self._address = address
        self._threads = cpus_per_run
        self._cpus = cpus_per_run * campaign.plan.ranks
        self._gpus = gpus_per_run * campaign.plan.ranks

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Submit the jobs, and resubmit those that the cluster loses, until each has an outcome.

        Raises:
            ConfigError: the cluster cannot be reached, does not use tokens or refuses ours, its nodes cannot execute
                the runs, or it lost one job ten times.
            Preempted, KeyboardInterrupt: a signal arrived; the runs have saved, and their leases are released.
        """
        # Imported late: `programs` also runs as a program and must not already be imported then.
        from retrain.campaign.work.programs import ray_task

        ray = _connect(self._address)
        try:
            resources = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            fits = [free for free in resources if free.get("CPU", 0) >= self._cpus and free.get("GPU", 0) >= self._gpus]
            if not fits:
                warning = f"no node has {self._cpus} CPUs and {self._gpus} GPUs; the runs wait until such a node joins"
                observe("message", {"text": warning, "level": "warning"})
            task = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0)(ray_task)
            folder = self._campaign.plan.folder
            path = str(self._campaign.path.resolve())
            tasks = _Tasks(ray, self._campaign, lambda job: task.remote(folder, path, job.id, self._threads), observe)
            with StopSignals() as signals:
                tasks.run(jobs, signals)
                signals.end("stopped; the runs have saved")
        finally:
            ray.shutdown()


class _Tasks:
    """The Ray tasks in flight, and the jobs that they execute."""

    def __init__(self, ray: Any, campaign: CampaignDirectory, submit: Any, observe: Observer) -> None:
        self._ray = ray
        self._campaign = campaign
        self._submit = submit
        self._observe = observe
        self._in_flight: dict[Any, Job] = {}
        self._started: set[str] = set()
        self._losses = Counter[str]()

    def run(self, jobs: Sequence[Job], signals: StopSignals) -> None:
        """Run the jobs until each has an outcome or a signal arrives; cancel the tasks that remain."""
        try:
            self._in_flight = {self._submit(job): job for job in jobs}
            while self._in_flight and signals.requested is None:
                for reference in self._ended():
                    self._end(reference, self._in_flight.pop(reference))
                self._report_starts()
                self._observe("tick", {})
        finally:
            self._cancel(signals)

    def _ended(self) -> list[Any]:
        return self._ray.wait([*self._in_flight], num_returns=len(self._in_flight), timeout=_POLL_S)[0]

    def _end(self, reference: Any, job: Job) -> None:
        """Report the outcome of the job of an ended task; resubmit the job if it has none.

        Raises:
            ConfigError: the cluster lost this job ten times.
        """
        loss = self._loss(reference, job)
        if outcome := self._campaign.outcome(job):
            self._report(job, str(outcome["status"]), str(outcome.get("reason") or ""))
            return
        if loss:
            self._losses[job.id] += 1
            if self._losses[job.id] == _LOSSES:
                problem = f"the cluster lost this run {_LOSSES} times: {loss}"
                raise ConfigError.at("Ray", job.id, problem, "check the logs of the cluster's nodes")
            self._report(job, "lost", loss)
        self._started.discard(job.id)
        self._in_flight[self._submit(job)] = job

    def _loss(self, reference: Any, job: Job) -> str:
        """Return the reason why Ray lost a task; "" if the task ended without an error.

        A task ends without an error if its job has an outcome, or if another worker holds the job.

        Raises:
            ConfigError: the cluster's nodes cannot execute the run.
            StorageError: a node cannot write the campaign's directory.
        """
        errors = self._ray.exceptions
        fix = "install retrain in the Python environment of Ray on every node, and mount the directory at the same path"
        try:
            code, printed = self._ray.get(reference)
        except (errors.RaySystemError, errors.RayTaskError) as error:
            raise ConfigError.at("Ray", job.id, f"cannot be executed: {_last(error)}", fix) from error
        except errors.RayError as error:
            return _last(error)
        if code < 0 or code in _STOPPED:
            return "its worker was stopped"
        if code == StorageError.exit_code:
            raise StorageError(printed)
        if code and not self._campaign.outcome(job):
            raise ConfigError.at("Ray", job.id, f"cannot be executed: {printed or f'exit code {code}'}", fix)
        return ""

    def _cancel(self, signals: StopSignals) -> None:
        """Cancel the tasks in flight, and wait while their runs save; a second signal ends the wait."""
        for reference in self._in_flight:
            self._ray.cancel(reference)
        while self._in_flight and not signals.urgent:
            for reference in self._ended():
                self._report(self._in_flight.pop(reference), "stopped", "")

    def _report_starts(self) -> None:
        for job in self._in_flight.values():
            if job.id not in self._started and held(self._campaign.path / "leases", job.id):
                self._started.add(job.id)
                self._report(job, "started", "")

    def _report(self, job: Job, event: str, text: str) -> None:
        self._observe("job", {"id": job.id, "event": event, "text": text})


def _connect(address: str) -> Any:
    """Connect to a running cluster with token authentication, and return the `ray` module."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # before the import, at which Ray reads it
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ["RAY_AUTH_MODE"] != "token":
        raise ConfigError.at(
            "Ray", address, "RAY_AUTH_MODE is not token", f"set RAY_AUTH_MODE=token, and put the token into {_TOKEN}"
        )
    ray = import_module("ray")
    fix = (
        "set [ray] address to a running cluster that this machine is a node of (`ray start`), "
        f"and put its token into {_TOKEN}"
    )
    if address != "auto":  # Ray would try for minutes before it reports an error
        host, _, port = address.rpartition(":")
        try:
            socket.create_connection((host, int(port)), _REACH_S).close()
        except OSError as error:
            raise ConfigError.at("Ray", address, f"cannot connect to a cluster: {error}", fix) from error
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except ray.exceptions.AuthenticationError as error:
        raise ConfigError.at("Ray", address, "no token found", f"put the cluster's token into {_TOKEN}") from error
    except (OSError, RuntimeError, ValueError) as error:
        problem = f"cannot connect, or the cluster rejects our token: {_last(error)}"
        raise ConfigError.at("Ray", address, problem, fix) from error
    if _admits_any_token(ray.get_runtime_context().gcs_address):
        ray.shutdown()
        fix = "start every node with RAY_AUTH_MODE=token: without it anyone who can connect can run code on the cluster"
        raise ConfigError.at("Ray", address, "the cluster does not require a token", fix)
    return ray


def _admits_any_token(address: str) -> bool:
    """Return True if a process with a wrong token can connect to the cluster.

    If the cluster rejects the token, Ray retries for 20 s, so the first "Unauthenticated" in the output decides.
    """
    streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    wrong = {"RAY_AUTH_TOKEN": "wrong-token-of-a-probe-" * 2}
    probe = start([sys.executable, "-c", _PROBE, address], wrong, encoding="utf-8", errors="replace", **streams)
    assert probe.stdout is not None
    with probe.stdout as output:
        try:
            return not any("Unauthenticated" in line for line in output) and probe.wait() == 0
        finally:
            end(probe)


def _last(error: BaseException) -> str:
    with suppress(IndexError):
        return str(error).strip().splitlines()[-1][:300]
    return type(error).__name__
