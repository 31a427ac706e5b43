"""Runs of a campaign as tasks of an existing Ray cluster that asks for a token.

Ray decides where a run is executed, and nothing else: leases and outcomes are files, as with every executor.
"""

from __future__ import annotations

import os
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
from retrain.errors import ConfigError, ConfigProblem, Preempted
from retrain.registry import executor
from retrain.types import Observer

_POLL_S = 1.0
_PROBE_S = 10.0
_LOSSES = 10
_STOPPED = (Preempted.exit_code, 130)
_TOKEN = "RAY_AUTH_TOKEN, the file RAY_AUTH_TOKEN_PATH or ~/.ray/auth_token"  # noqa: S105 - where it is, not what


@executor("ray", extra=("ray", "ray"))
class RayCluster:
    """Tasks of a Ray cluster, one per run.

    Args:
        campaign: whose runs; every node sees its directory, and the folder of this process, at the same path.
        address: HOST:PORT of the cluster; "auto": RAY_ADDRESS, or the cluster that this machine is a node of.
        cpus_per_run: CPUs that Ray sets aside for each rank of a run, and its threads.
        gpus_per_run: GPUs that Ray sets aside for each rank of a run, on one node; it sees no others.
    """

    def __init__(
        self,
        campaign: CampaignDirectory,
        *,
        address: Annotated[str, Field(pattern=r"^(auto|[^/\s]+:\d+)$")] = "auto",
        cpus_per_run: Annotated[int, Field(ge=1)] = 1,
        gpus_per_run: Annotated[int, Field(ge=0)] = 0,
    ) -> None:
        self._campaign, self._address = campaign, address
        self._threads = cpus_per_run
        self._cpus, self._gpus = cpus_per_run * campaign.plan.ranks, gpus_per_run * campaign.plan.ranks

    def run(self, jobs: Sequence[Job], observe: Observer) -> None:
        """Submit the jobs, and submit again what the cluster loses, until each has an outcome.

        Raises:
            ConfigError: no cluster, one without a token or with another, or nodes that cannot do the runs.
            Preempted, KeyboardInterrupt: a signal came; the runs have saved, and their leases are free.
        """
        from retrain.campaign.work.programs import ray_task  # not before: it is a program too

        ray = _connect(self._address)
        try:
            has = [node["Resources"] for node in ray.nodes() if node["Alive"]]
            if not any(one.get("CPU", 0) >= self._cpus and one.get("GPU", 0) >= self._gpus for one in has):
                text = f"no node of the cluster has {self._cpus} CPUs and {self._gpus} GPUs; the runs wait for one"
                observe("message", {"text": text, "level": "warning"})
            task = ray.remote(num_cpus=self._cpus, num_gpus=self._gpus, max_retries=0)(ray_task)
            folder, path = self._campaign.plan.folder, str(self._campaign.path.resolve())
            tasks = _Tasks(ray, self._campaign, lambda job: task.remote(folder, path, job.id, self._threads), observe)
            with StopSignals() as signals:
                tasks.run(jobs, signals)
                signals.end("stopped; the same command continues")
        finally:
            ray.shutdown()


class _Tasks:
    """The tasks in flight."""

    def __init__(self, ray: Any, campaign: CampaignDirectory, submit: Any, observe: Observer) -> None:
        self._ray, self._campaign, self._submit, self._observe = ray, campaign, submit, observe
        self._flying: dict[Any, Job] = {}
        self._started: set[str] = set()
        self._losses = Counter[str]()

    def run(self, jobs: Sequence[Job], signals: StopSignals) -> None:
        """Until every job has an outcome or a signal has come; no task is left behind."""
        try:
            self._flying = {self._submit(job): job for job in jobs}
            while self._flying and signals.requested is None:
                for reference in self._ended():
                    self._end(reference, self._flying.pop(reference))
                self._tell_starts()
                self._observe("tick", {})
        finally:
            self._cancel(signals)

    def _ended(self) -> list[Any]:
        return self._ray.wait([*self._flying], num_returns=len(self._flying), timeout=_POLL_S)[0]

    def _end(self, reference: Any, job: Job) -> None:
        """Tell how the job ended; if it did not, submit it again."""
        loss = self._loss(reference, job)
        if outcome := self._campaign.outcome(job):
            self._tell(job, str(outcome["status"]), str(outcome.get("reason") or ""))
            return
        if loss:
            self._losses[job.id] += 1
            if self._losses[job.id] == _LOSSES:
                problem = f"the cluster has lost it {_LOSSES} times: {loss}"
                raise _refusal(job.id, problem, "look at the logs of its nodes")
            self._tell(job, "lost", loss)
        self._started.discard(job.id)
        self._flying[self._submit(job)] = job

    def _loss(self, reference: Any, job: Job) -> str:
        """Why a task ended too early; empty if it did not, or if somebody else works on its run."""
        errors = self._ray.exceptions
        fix = "every node needs retrain in the environment of its Ray, and the folder at the same path"
        try:
            code, said = self._ray.get(reference)
        except (errors.RaySystemError, errors.RayTaskError) as error:
            raise _refusal(job.id, f"cannot be executed: {_last(error)}", fix) from error
        except errors.RayError as error:
            return _last(error)
        if code < 0 or code in _STOPPED:
            return "its worker was stopped"
        if code and not self._campaign.outcome(job):
            raise _refusal(job.id, f"cannot be executed: {said or f'exit code {code}'}", fix)
        return ""

    def _cancel(self, signals: StopSignals) -> None:
        """End what is in flight, and wait while the runs save; a second signal ends the wait."""
        for reference in self._flying:
            self._ray.cancel(reference)
        while self._flying and not signals.urgent:
            for reference in self._ended():
                self._tell(self._flying.pop(reference), "stopped", "")

    def _tell_starts(self) -> None:
        for job in self._flying.values():
            if job.id not in self._started and held(self._campaign.path / "leases", job.id):
                self._started.add(job.id)
                self._tell(job, "started", "")

    def _tell(self, job: Job, event: str, text: str) -> None:
        self._observe("job", {"id": job.id, "event": event, "text": text})


def _connect(address: str) -> Any:
    """The `ray` module, connected to a running cluster that asked for a token and knows ours."""
    os.environ.setdefault("RAY_AUTH_MODE", "token")  # Ray reads it when it is imported
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    if os.environ["RAY_AUTH_MODE"] != "token":
        raise _refusal(address, "RAY_AUTH_MODE is not token", f"set it to token, and put the token into {_TOKEN}")
    ray = import_module("ray")
    try:
        found = import_module("ray._private.services").canonicalize_bootstrap_address_or_die(address)
        _probe(found)
        ray.init(address=found, log_to_driver=False, logging_level="ERROR")
    except ray.exceptions.AuthenticationError as error:
        raise _refusal(address, "there is no token", f"put the cluster's into {_TOKEN}") from error
    except (ConnectionError, RuntimeError, ValueError) as error:
        fix = "give [ray] address of a running cluster that this machine is a node of (`ray start`)"
        raise _refusal(address, f"cannot connect: {_last(error)}", fix) from error
    return ray


def _probe(address: str) -> None:
    """ConfigError unless the cluster refuses a wrong token and takes ours."""
    grpc, utils = import_module("grpc"), import_module("ray._private.grpc_utils")

    def answer(metadata: Sequence[tuple[str, str]]) -> Any:
        try:
            channel.unary_unary("/ray.rpc.NodeInfoGcsService/CheckAlive")(b"", timeout=_PROBE_S, metadata=metadata)
        except grpc.RpcError as error:
            return error.code()
        return grpc.StatusCode.OK

    with utils.init_grpc_channel(address) as channel:  # it adds our token to every call
        wrong, ours = answer([("authorization", "Bearer wrong")]), answer([])
    if wrong == grpc.StatusCode.OK:
        fix = "start every node with RAY_AUTH_MODE=token: whoever reaches a cluster without can run anything on it"
        raise _refusal(address, "the cluster asks for no token", fix)
    if ours == grpc.StatusCode.UNAUTHENTICATED:
        raise _refusal(address, "the cluster does not take our token", f"put the cluster's into {_TOKEN}")
    if ours != grpc.StatusCode.OK:
        raise ConnectionError(f"no cluster answers at {address}: {ours.name}")


def _refusal(key: str, problem: str, fix: str) -> ConfigError:
    return ConfigError([ConfigProblem("Ray", 0, 0, key, problem, fix)])


def _last(error: BaseException) -> str:
    with suppress(IndexError):
        return str(error).strip().splitlines()[-1][:300]
    return type(error).__name__
