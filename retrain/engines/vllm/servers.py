"""Engine that samples from any number of vLLM servers over HTTP and tolerates their failures."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field

from retrain.engines.capability import base_model, check_weights, full_shapes
from retrain.engines.vllm import vllm_options as options
from retrain.engines.vllm import weight_transfer as vllm_transfer
from retrain.engines.vllm.routing import Assignment, Router
from retrain.errors import EngineError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.system import event_loop
from retrain.system import http_client as http
from retrain.types import Completion, Metrics, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_logger = logging.getLogger(__name__)

_VERSIONS = ("0.32.", "0.33.")
_PROBE_S = 10.0
"""Timeout for a server's version, in seconds; a server that takes longer gets no weights."""
_INSPECTION_S = 60.0
"""Timeout for a server's options, in seconds. vLLM examines its whole machine for the first answer."""
_CONTROL_S = 30.0
"""Timeout of calls that only change a server's state, such as a pause, in seconds."""
_STOPPING_S = 5.0
"""Time in which servers must finish a load once the run is asked to stop, in seconds."""
_LATE_S = 30.0
"""A server may load weights for twice the time of the first, or for so much longer, in seconds; then it is excluded."""
_POLL_S = 0.2
"""Seconds between two looks at servers that load weights."""
_LONGEST_PAUSE_S = 600.0
"""Longest time for which a server with invalid answers is left out, in seconds."""
_FAILED_CHECKS = 2
"""A server that fails so many health checks in a row is excluded."""
_ATTEMPTS = 4
"""Times that a request is sent before the run ends; more would only delay the reason, which names every server."""
HEALTH_EVERY_S = 10.0
"""Seconds between checks of every server's `/health` while requests are in flight. A server that fails `_FAILED_CHECKS`
in a row is excluded; an excluded one that passes gets the current weights and samples again."""
_SHOWN_S = 30.0
"""Seconds between two log lines about waiting for servers."""
_STARTING = 503
"""HTTP status of a server that is not ready yet."""
_ADAPTER = "adapter"
"""Name of the adapter on the servers."""
_R = TypeVar("_R")


_SERVE = ("gpu_memory_utilization", "kv_cache_mb", "max_model_len", "tensor_parallel_size", "enforce_eager")
"""Keys of [vllm] that only `retrain serve` reads, to start a server."""


@engine(
    "vllm-server",
    table="vllm",
    concurrent=True,
    remote=True,
    serve_keys=(*_SERVE, "quantization"),
    check=options.check_table,
    adapters=options.ADAPTERS,
    reaches={"urls": "replaces the weights of servers"},
)
class VllmServerEngine(Sampler):
    """Samples from vLLM servers, which load new weights from a file or from the trainer's GPU.

    Every prompt is one HTTP request with a timeout, sent to the least loaded server; the turns of an
    episode stay on one server, which has computed their context. A server that fails, hangs, or
    answers with stale weights gets no requests until it has loaded the current weights; its requests
    go to other servers, or to itself after its recovery.

    Start the servers yourself. `retrain serve` starts one with the required flags, among them
    VLLM_SERVER_DEV_MODE=1, which enables the endpoints that replace weights. These endpoints do not
    check a password.

    Args:
        model: a transformers causal LM, for the names and shapes of its weights.
        run_dir: directory of the run; weights are exchanged in its folder `vllm`.
        trainer_dtype: dtype of the trainer's matrix products.
        urls: addresses of the servers, such as "http://127.0.0.1:8000".
        allow_remote: accept addresses that other machines can reach; the network must be private.
        request_timeout_s: timeout for one prompt's completions and for loading weights, in seconds.
        start_timeout_s: wait for a first server to start at the beginning of the run, in seconds. On a slow machine
            vLLM needs minutes.
        restart_timeout_s: wait for a server to recover while none is usable, in seconds.
        max_in_flight: completions in flight on one server; further requests wait in the trainer.
        api_key_env: environment variable with the servers' key; "" sends none.
        transfer: "file" writes weights to a path that trainer and servers share; "nccl" sends them
            to other GPUs; "ipc" shares them on the same GPU. The last two use vLLM's transfer, and
            the servers must have been started for it.
        lora: "adapter" sends LoRA's adapter alone, in a file; "merged" sends merged weights. Unset,
            "adapter"; but "merged" with dtype = "float32", which merges exactly.
        dtype: of the servers' weights and matrix products. "auto" is the trainer's,
            `[model] dtype`, so that both round alike.

    Attributes:
        version: of the weights in use; None before the first ones are loaded.
        tolerance: mean difference per token from the trainer's log-probs, in nats, that rounding
            explains.
        takes_adapters: weights are a base from `load_weights` and an adapter from `load_adapter`.
    """

    version: int | None = None
    _adapter: Path | None = None
    _failure: EngineError | None = None
    _reviving: asyncio.Future[None] | None = None
    _watching: Future[None] | None = None

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        model: Any,
        run_dir: Path,
        trainer_dtype: str,
        *,
        urls: Annotated[list[str], Field(min_length=1)],
        allow_remote: bool = False,
        request_timeout_s: Annotated[float, Field(gt=0)] = 600.0,
        start_timeout_s: Annotated[float, Field(gt=0)] = 600.0,
        restart_timeout_s: Annotated[float, Field(gt=0)] = 120.0,
        max_in_flight: Annotated[int, Field(gt=0)] = 512,
        api_key_env: str = "",
        transfer: vllm_transfer.Name = "file",
        lora: Literal["adapter", "merged"] | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        for _, problem, fix in http.address_mistakes(urls, allow_remote):
            raise EngineError(f"[vllm] urls: {problem}; {fix}")
        self._urls = [url.rstrip("/") for url in urls]
        self._call = http.Calls(request_timeout_s, key=http.key_from(api_key_env))
        self._start, self._restart = start_timeout_s, restart_timeout_s
        self._stop_requested = threading.Event()
        self._expected = full_shapes(base_model(model))
        self._folder = Path(options.write_config(base_model(model), run_dir / "vllm")).resolve()
        device = next(model.parameters()).device
        self._transfer = vllm_transfer.transfer(transfer, self._folder, device, self._call)
        self._backend = transfer
        kind = options.resolved(dtype, trainer_dtype)
        self.takes_adapters = options.by_itself(lora, dtype, kind, device.type == "cpu") and (
            lora is not None or options.is_adapted(model)
        )
        self._rank = options.adapter_rank(model) if self.takes_adapters else 0
        # A label that no other run has, so that `_confirm` notices another run.
        self._claim = f"incomplete, of {uuid.uuid4().hex}"
        self._models: dict[str, Mapping[str, Any]] = {}
        self._base, self._label, self._versions = "", "", dict[str, int]()
        self._loads = 0
        self._held: dict[str, tuple[str, int]] = {}
        self._router = Router(self._urls, max_in_flight)
        self._revivals, self._reissued, self._refused = 0, 0, 0
        self._failed_checks = dict.fromkeys(self._urls, 0)
        self._syncing = threading.RLock()
        self.tolerance = tolerance_of(kind)
        self._why: dict[str, str] = {}
        self._strikes, self._out_until = Counter[str](), dict[str, float]()
        self._absent: set[str] = set()
        self._await_start()

    def describe(self) -> str:
        """List the usable servers, and the reasons why others are not usable."""
        usable = ", ".join(url for url in self._urls if url not in self._why)
        return f"vLLM servers at {usable}" + (f"; without {self._reasons()}" if self._why else "")

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Load a full state dict into every server.

        A server that fails gets no requests until it has loaded the current weights.

        Raises:
            EngineError: names or shapes do not fit the model, or no server could load the weights.
        """
        check_weights(self._expected, weights)
        with self._loading():
            self._transfer.take(weights)
            # A server that has missed one needs the base again, not only the adapter.
            self._loads += 1
            self._base, self._adapter = f"{self._folder}@{version}", None
            self._renew(self._base, version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Load an adapter in PEFT's format into every server, on the weights of the last `load_weights`.

        Raises:
            EngineError: no server could load it.
        """
        with self._loading():
            self._adapter = folder.resolve()
            self._renew(f"{self._base}+{version}", version)

    @contextmanager
    def _loading(self) -> Generator[None]:
        """Exclude other syncs; without weights if the block fails."""
        with self._syncing:
            try:
                yield
            except BaseException:
                self.version = None
                raise

    def _renew(self, label: str, version: int) -> None:
        self._label, self._failure = label, None
        self._versions = {**(self._versions if self.continuous else {}), label: version}
        self._sync_all()
        self._revive()
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests."""
        options.check(requests, sampling, self.version, self.max_model_len)
        self._failure = None
        return event_loop.run(event_loop.gather(self.generate(request, sampling) for request in requests))

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return the completions of one request, from the first server that succeeds."""
        options.check([request], sampling, self.version, self.max_model_len)
        if self._watching is None or self._watching.done():
            self._watching = event_loop.submit(self._watch())
        try:
            return await self._request(request, sampling)
        except asyncio.CancelledError:
            if self._failure is None:  # the run is interrupted: end the threads that wait for servers
                self._call.abort()
            raise

    @property
    def max_model_len(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Largest number of tokens of a context with its completion that every server supports."""
        return min(int(model["max_model_len"]) for model in self._models.values())

    def _together(
        self, function: Callable[[str], _R], urls: Sequence[str], limit: Callable[[list[_R]], float] = lambda _: inf
    ) -> list[_R]:
        """Map a function over servers in threads; Ctrl-C or another exception aborts their HTTP calls.

        Args:
            function: called with each server.
            urls: the servers.
            limit: receives the results so far, and returns the time at which calls in progress are cancelled.
        """
        pool = ThreadPoolExecutor(len(urls))
        try:
            futures = {pool.submit(function, url): url for url in urls}
            while late := wait(futures, _POLL_S).not_done:
                if time.monotonic() > limit([future.result() for future in futures if future not in late]):
                    self._call.cancel(futures[future] for future in late)
        except BaseException:
            self._call.abort()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]

    def close(self) -> None:
        """Close the connections for weight transfer; the servers keep running."""
        if self._watching is not None:
            self._watching.cancel()
        for url in self._urls:
            self._transfer.drop(url)

    def metrics(self) -> Metrics:
        """Return counts since the last call: repeated requests, rejected answers, requests that waited for a free slot.

        `sampler/servers` is the number of usable servers.
        """
        counts = {
            "sampler/reissued": float(self._reissued),
            "sampler/refused": float(self._refused),
            "sampler/servers": float(len(self._router.usable)),
            "sampler/waited": float(self._router.waited),
        }
        self._reissued = self._refused = self._router.waited = 0
        return counts

    async def _request(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return one request's completions from the first server that succeeds."""
        body: dict[str, Any] = {"token_ids": list(request.ids)} | ({"model": _ADAPTER} if self._adapter else {})
        body["sampling_params"] = options.request_fields(request, sampling)
        for attempt in range(_ATTEMPTS):
            assigned = await self._assigned(request)
            self._reissued += attempt > 0
            try:
                call = self._call.request(assigned.url + "/inference/v1/generate", body)
                answer = await self._router.run(assigned, call)
            except http.FAILURES as error:
                # A restarted server does not have the adapter and answers 404: treat it as a failure.
                if isinstance(error, http.HttpError) and error.code < 500 and error.code != 404:
                    self._give_up(f"{assigned.url} refuses the request: {error}")
                self._distrust(assigned, error)
                continue
            try:
                completions = self._completions(answer, request, sampling)
                self._strikes[assigned.url] = 0
                return completions
            except http.FAILURES as error:
                self._refused += 1
                self._distrust(assigned, error)
        self._give_up(f"a request failed {_ATTEMPTS} times; {self._reasons()}")

    async def _assigned(self, request: Request) -> Assignment:
        """Choose the server of a request, waiting for one to recover if none is usable.

        Raises:
            EngineError: another request has ended the run, or no server has recovered in time.
        """
        while True:
            if self._failure is not None:
                raise self._failure
            if self._call.aborted.is_set():
                raise EngineError("sampling was interrupted")
            if (server := await self._router.assign(request)) is not None:
                return server
            if self._reviving is None or self._reviving.done():
                # In another thread, because it makes calls and waits; one for all requests.
                self._reviving = asyncio.ensure_future(asyncio.to_thread(self._revive))
                # All requests that wait for it may be cancelled; then nobody retrieves its error.
                self._reviving.add_done_callback(lambda done: done.cancelled() or done.exception())
            await asyncio.shield(self._reviving)

    def _completions(self, answer: Any, request: Request, sampling: Sampling) -> list[Completion]:
        """Parse the completions of an answer.

        Raises:
            ValueError: the answer does not fit the request, or comes from weights that this run has not loaded.
        """
        label_versions = self._versions
        rows: list[tuple[list[int], list[float], str]] = []
        versions: list[list[int]] = []
        for choice in answer["choices"]:
            ids, content = choice["token_ids"], choice["logprobs"]["content"]
            spans = choice["weight_versions"] or ()
            labels, ends = {span["version"] for span in spans}, [0, *(span["end"] for span in spans)]
            if not labels or not labels <= label_versions.keys():
                raise ValueError(f"it sampled from the weights {', '.join(sorted(labels))}, not {self._label}")
            # Spans without gaps, in order, up to the last token.
            if [span["start"] for span in spans] != ends[:-1] or ends != sorted(ends) or ends[-1] != len(ids):
                raise ValueError(f"the weights of its {len(ids)} tokens have the spans {spans}")
            if [entry["token_id"] for entry in content] != ids:
                raise ValueError(f"its {len(content)} log-probs do not belong to its {len(ids)} tokens")
            rows.append((ids, [entry["logprob"] for entry in content], choice["finish_reason"]))
            parts = [[label_versions[span["version"]]] * (span["end"] - span["start"]) for span in spans]
            versions.append([version for part in parts for version in part])
        return options.completions(rows, request, sampling, versions)

    def _sync_all(self) -> None:
        """Load the current weights into all servers. A server that is much later than the first is excluded."""
        began, limit = time.monotonic(), inf

        def until(loaded: list[bool]) -> float:
            nonlocal limit
            now = time.monotonic()
            # Fixed by the first server that has loaded; later ones do not extend it.
            limit = min(limit, now + max(_LATE_S, now - began)) if any(loaded) else limit
            limit = min(limit, now + _STOPPING_S) if self._stop_requested.is_set() else limit
            return limit

        loaded = self._together(self._sync, self._urls, until)
        self._router.join(url for url, good in zip(self._urls, loaded, strict=True) if good)

    def _sync(self, url: str) -> bool:
        """Load the current weights into a server and empty its prefix cache; return False on failure."""
        try:
            label, loads = self._held.pop(url, ("", 0))
            if restarted := self._probe(url) != label:
                self._transfer.drop(url)
                self._inspect(url)
            # In a continuous run requests go on between two tokens, with the new weights. Others are of an earlier
            # call, and may still be running there.
            keeps = self.continuous and url in self._router.usable
            self._control(f"{url}/pause?mode={'keep' if keeps else 'abort'}")
            self._mark(url, self._claim)
            if restarted or loads != self._loads:
                self._give(url)
            if self._adapter is not None:
                adapter = {"lora_name": _ADAPTER, "lora_path": str(self._adapter), "load_inplace": True}
                self._call(url + "/v1/load_lora_adapter", adapter)
            reset = f"{url}/reset_prefix_cache" + ("?reset_running_requests=true" if keeps else "")
            if not self._control(reset)["success"]:
                raise ValueError("it did not empty its prefix cache")
            self._confirm(url, self._claim)
            self._mark(url, self._label)
            self._control(url + "/resume")
            self._confirm(url, self._label)
        except http.FAILURES as error:
            self._why[url] = _cause(error)
            self._transfer.drop(url)
            self._router.drop(url)
            return False
        self._held[url] = (self._label, self._loads)
        self._why.pop(url, None)
        return True

    def _give(self, url: str) -> None:
        try:
            self._transfer.give(url)
        except http.HttpError as error:
            served = self._models[url]["model"]
            raise ValueError(f"{error}; it serves {served}: is that the architecture that is trained?") from None

    def _mark(self, url: str, label: str) -> None:
        """Set the label of a server's weights."""
        self._control(url + "/update_weight_version", {"new_version": label})

    def _control(self, url: str, body: Mapping[str, Any] | None = None) -> Any:
        return self._call(url, body or {}, min(_CONTROL_S, self._call.seconds))

    def _confirm(self, url: str, label: str) -> None:
        """Check that the label of a server's weights is still the one that this run has set.

        Two runs may load weights into one server at the same time. The run that notices it sets a
        label that belongs to neither, so that both reject the completions. A full sync by the other
        run between two requests of this one goes unnoticed here.

        Raises:
            ValueError: the label has changed.
        """
        server_label = self._label_of(url, min(_CONTROL_S, self._call.seconds))
        if server_label != label:
            self._mark(url, f"mixed, of {server_label} and {label}")
            self._control(url + "/resume")
            raise ValueError(
                f"its weights changed to {server_label} meanwhile: another run uses it, or it was restarted"
            )

    def _give_up(self, text: str) -> NoReturn:
        self._failure = EngineError(text)
        raise self._failure

    def _distrust(self, assigned: Assignment, error: Exception) -> None:
        """Exclude a server, unless it has recovered since the failed request was sent."""
        self._why.setdefault(assigned.url, _cause(error))  # an earlier cause stays
        if assigned.url in self._router.usable:
            pause = HEALTH_EVERY_S * (2.0 ** self._strikes[assigned.url] - 1)
            self._out_until[assigned.url] = time.monotonic() + min(pause, _LONGEST_PAUSE_S)
            self._strikes[assigned.url] += 1
        self._router.distrust(assigned)

    async def _watch(self) -> None:
        """Check the health of all servers again and again while requests are in flight."""
        while True:
            await asyncio.sleep(HEALTH_EVERY_S)
            if not self._router.busy:
                # Before the future is done: a request that begins meanwhile must not count on this watch.
                self._watching = None
                return
            await event_loop.gather(map(self._check_health, self._urls))

    async def _check_health(self, url: str) -> None:
        """Exclude a server that does not answer, and give an excluded one that does the current weights."""
        try:
            await self._call.request(f"{url}/health", None, min(_PROBE_S, self._call.seconds))
        except http.FAILURES as error:
            self._failed_checks[url] += 1
            if self._failed_checks[url] >= _FAILED_CHECKS and url in self._router.usable:
                self._why[url] = f"health check: {_cause(error)}"
                self._router.drop(url)
            return
        self._failed_checks[url] = 0
        if url not in self._router.usable and time.monotonic() >= self._out_until.get(url, 0.0):
            await asyncio.to_thread(self._rejoin, url)

    def _rejoin(self, url: str) -> None:
        """Load the current weights into one excluded server."""
        with self._syncing:
            idle = self.version is None or self._call.aborted.is_set() or url in self._router.usable
            if not idle and self._sync(url):
                self._router.join([url])

    def _revive(self) -> None:
        """If no server is usable, wait for one to recover and load the current weights.

        Raises:
            EngineError: none has done so within `restart_timeout_s`, or the run is being stopped.
        """
        with self._syncing:
            if self._router.usable:
                return
            self._revivals += 1
            until = time.monotonic() + self._restart
            while not self._router.usable:
                self._sync_all()
                if self._router.usable:
                    return
                if self._stop_requested.is_set() or time.monotonic() > until:
                    self._give_up(f"no vLLM server is usable; {self._reasons()}")
                if self._call.aborted.wait(min(1.0, self._restart)):
                    self._give_up("sampling was interrupted")

    def request_stop(self) -> None:
        """Stop waiting for servers to recover: the run is being stopped, and they may be stopping too."""
        self._stop_requested.set()

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {self._why[url]}" for url in self._urls if url in self._why)

    def _await_start(self) -> None:
        """Check all servers; if none is usable but some do not answer yet, wait for one to start.

        Raises:
            EngineError: no server is usable, or none has started within `start_timeout_s`.
        """
        began, shown = time.monotonic(), 0.0
        self._together(self._greet, self._urls)
        while len(self._why) == len(self._urls):
            waited = time.monotonic() - began
            if not self._absent or waited > self._start or self._stop_requested.is_set():
                raise EngineError(self._reasons())
            if waited >= shown:
                shown += _SHOWN_S
                absent = ", ".join(url for url in self._urls if url in self._absent)
                limit = f"{waited:.0f} of at most {self._start:g} s, [vllm] start_timeout_s"
                _logger.warning("waiting for a vLLM server to answer at %s (%s)", absent, limit)
            self._call.aborted.wait(min(1.0, self._start))
            self._together(self._greet, sorted(self._absent))

    def _greet(self, url: str) -> None:
        """Check one server: its vLLM version, options, and endpoints for weights. Record any problem."""
        self._absent.discard(url)
        try:
            self._probe(url)
            self._inspect(url)
            self._why.pop(url, None)
        except http.HttpError as error:
            if error.code == _STARTING:
                self._absent.add(url)
            self._why[url] = f"{error}; start it with `retrain serve`, which sets VLLM_SERVER_DEV_MODE=1"
        except http.FAILURES as error:
            if isinstance(error, OSError):
                self._absent.add(url)
            self._why[url] = f"{_cause(error)}; start it with `retrain serve`, or correct [vllm] urls"

    def _probe(self, url: str) -> str:
        """Check a server's version and return the label of its weights.

        The label comes from the server's sampling process, so a hang of that process is noticed too.

        Raises:
            ValueError: retrain does not support this version of vLLM.
        """
        seconds = min(_PROBE_S, self._call.seconds)
        version = str(self._call(f"{url}/version", None, seconds)["version"])
        if not version.startswith(_VERSIONS):
            raise ValueError(f"it is vLLM {version}; install vLLM 0.32 or 0.33")
        return self._label_of(url, seconds)

    def _label_of(self, url: str, seconds: float) -> str:
        return str(self._call(f"{url}/weight_info", None, seconds)["weight_version"])

    def _inspect(self, url: str) -> None:
        """Check the options that a server was started with.

        Raises:
            ValueError: it lacks the weight transfer or the adapter support that this run needs.
        """
        seconds = min(_INSPECTION_S, self._call.seconds)
        config = self._call(url + "/server_info?config_format=json", None, seconds)["vllm_config"]
        backend = (config["weight_transfer_config"] or {"backend": "file"})["backend"]
        if self._backend not in ("file", backend):
            raise ValueError(f'it was started with transfer = "{backend}", not "{self._backend}"')
        if self.takes_adapters and not config["lora_config"]:
            raise ValueError(
                f"it was started without support for adapters; restart it for this run, or {options.MERGE}"
            )
        if self.takes_adapters and (rank := config["lora_config"]["max_lora_rank"]) < self._rank:
            raise ValueError(f"it was started for adapters of rank {rank} at most, and [model.lora] r is {self._rank}")
        self._models[url] = config["model_config"]


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
