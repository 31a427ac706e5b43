"""vLLM servers in other processes, over HTTP: any number of them, and any of them may die."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn, TypeVar

from pydantic import Field

from retrain.engines.capability import base_model, check_weights, full_shapes
from retrain.engines.vllm import vllm_options as options
from retrain.engines.vllm import weight_transfer as vllm_transfer
from retrain.errors import EngineError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.system import http_client as http
from retrain.types import Ask, Completion, Hear, Metrics, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_VERSIONS = ("0.32.", "0.33.")
_AT_ONCE = 64
"""Requests in flight; a server batches what it has."""
_LOOK_S = 0.005
"""How long to wait for the servers before looking whether there is more to ask."""
_PROBE_S = 10.0
"""A server that does not say its version within this time is not given weights: it is frozen, or gone."""
_INSPECTION_S = 60.0
"""The same for what it was started with: the first time vLLM looks over its whole machine for that."""
_ADAPTER = "adapter"
"""What the servers call the adapter."""
_T = TypeVar("_T")
_R = TypeVar("_R")


_SERVE = ("gpu_memory_utilization", "kv_cache_mb", "max_model_len", "tensor_parallel_size", "enforce_eager")
"""Keys of [vllm] that `retrain serve` reads to start a server, and the run does not."""


@engine(
    "vllm-server",
    table="vllm",
    concurrent=True,
    elsewhere=True,
    also=(*_SERVE, "quantization"),
    check=options.check_table,
    adapters=options.ADAPTERS,
    reaches={"urls": "replaces the weights of servers"},
)
class VllmServerEngine(Sampler):
    """Samples from vLLM servers, which take new weights from a file or from the trainer's GPU.

    Every prompt is a request with a time limit. A server that fails, hangs, or answers with other weights than
    asked for is not asked again before it has taken the current weights; its requests go to the others, or to
    itself once it is back.

    The servers are the user's to start: `retrain serve` does it with the right flags, among them
    VLLM_SERVER_DEV_MODE=1 for the endpoints that replace weights. Those ask for no password.

    Args:
        model: a transformers causal LM: the names and shapes of its weights.
        run_dir: weights are handed over in `run_dir/vllm`.
        urls: of the servers, such as "http://127.0.0.1:8000".
        allow_remote: take urls that other machines can reach as well, because the network is private.
        request_timeout_s: for one prompt's completions, and for loading weights.
        restart_timeout_s: how long to wait for a server to come back when all have failed.
        retries: how often a request is issued again before the run ends.
        transfer: how weights reach the servers: "file" that they and the trainer both see; "nccl" to other GPUs;
            "ipc" on the same GPU. The last two are vLLM's own, and the servers must have been started for them.
        lora: "adapter" hands over LoRA's adapter alone, in a file; "merged" adds it to the weights. Unset:
            "adapter", but "merged" with dtype = "float32", which loses nothing by it.
        dtype: of the servers' weights and products; "auto" allows for bfloat16 in the comparison with the trainer.

    Attributes:
        version: of the weights in force; None until there are any.
        tolerance: mean difference per token from the trainer's log-probs, in nats, that is still rounding.
        takes_adapters: whether it is to be given adapters.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        model: Any,
        run_dir: Path,
        *,
        urls: Annotated[list[str], Field(min_length=1)],
        allow_remote: bool = False,
        request_timeout_s: Annotated[float, Field(gt=0)] = 600.0,
        restart_timeout_s: Annotated[float, Field(gt=0)] = 120.0,
        retries: Annotated[int, Field(ge=0)] = 3,
        transfer: vllm_transfer.Name = "file",
        lora: Literal["adapter", "merged"] | None = None,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
    ) -> None:
        for _, problem, fix in http.address_mistakes(urls, allow_remote):
            raise EngineError(f"[vllm] urls: {problem}; {fix}")
        self._urls = [url.rstrip("/") for url in urls]
        self._call = http.Calls(request_timeout_s)
        self._restart, self._retries = restart_timeout_s, retries
        self._hurried = threading.Event()
        self._expected = full_shapes(base_model(model))
        self._folder = Path(options.write_config(base_model(model), run_dir / "vllm")).resolve()
        place = next(model.parameters()).device
        self._transfer = vllm_transfer.transfer(transfer, self._folder, place, self._call)
        self._backend = transfer
        self.takes_adapters = options.by_itself(lora, dtype) and (lora is not None or options.is_adapted(model))
        self._rank = options.adapter_rank(model) if self.takes_adapters else 0
        self._claim = f"incomplete, of {uuid.uuid4().hex}"
        self._models: dict[str, Mapping[str, Any]] = {}
        self._base, self._label = "", ""
        self._adapter: Path | None = None
        self._loads = 0
        self._held: dict[str, tuple[str, int]] = {}
        self._healthy: list[str] = []
        self._revivals, self._reissued, self._refused = 0, 0, 0
        self._failure: EngineError | None = None
        self._lock = threading.Lock()
        self.tolerance = tolerance_of("float32" if dtype == "float32" else "bfloat16")
        self.version: int | None = None
        self._why: dict[str, str] = {}
        self._together(self._greet, self._urls, len(self._urls))
        if len(self._why) == len(self._urls):
            raise EngineError(self._reasons())

    def describe(self) -> str:
        """Which servers sample, in words, and which cannot be used so far."""
        usable = ", ".join(url for url in self._urls if url not in self._why)
        return f"vLLM servers at {usable}" + (f"; without {self._reasons()}" if self._why else "")

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have every server load a full state dict; one that fails is left out until it has loaded the current ones.

        Raises:
            EngineError: names or shapes are not the model's, or no server could load them.
        """
        check_weights(self._expected, weights)
        self.version = None
        self._transfer.take(weights)
        self._loads += 1
        self._base, self._adapter = f"{self._folder}@{version}", None
        self._renew(self._base, version)

    def load_adapter(self, folder: Path, version: int) -> None:
        """Have every server load an adapter in peft's format on top of the weights of the last `load_weights`.

        Raises:
            EngineError: no server could load it.
        """
        self.version, self._adapter = None, folder.resolve()
        self._renew(f"{self._base}+{version}", version)

    def _renew(self, label: str, version: int) -> None:
        self._label = label
        self._sync_all()
        if not self._healthy:
            self._revive()
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The completions of every request, in the requests' order."""
        options.check(requests, sampling, self.version, self.room)
        self._failure = None
        return self._together(lambda n: self._request(n, requests[n], sampling), range(len(requests)), _AT_ONCE)

    def keep_sampling(self, ask: Ask, hear: Hear, sampling: Sampling) -> None:
        """Sample what is asked until there is no more, and give each request's completions to `hear` as they come."""
        self._failure, waiting, numbers = None, 0, count()
        done, pool = SimpleQueue[tuple[Request, Future[list[Completion]]]](), ThreadPoolExecutor(_AT_ONCE)

        def begin(request: Request) -> None:
            future = pool.submit(self._request, next(numbers), request, sampling)
            future.add_done_callback(lambda future: done.put((request, future)))

        try:
            while (requests := ask(not waiting)) is not None:
                options.check(requests, sampling, self.version, self.room)
                for request in requests:
                    begin(request)
                waiting += len(requests)
                with suppress(Empty):
                    request, future = done.get(timeout=_LOOK_S)
                    waiting -= 1
                    hear(request, future.result())
        except BaseException:
            self._call.break_off()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    @property
    def room(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """Tokens of a context with its completion that every server takes."""
        return min(int(known["max_model_len"]) for known in self._models.values())

    def _together(self, function: Callable[[_T], _R], items: Sequence[_T], threads: int) -> list[_R]:
        """The function of every item, in threads; Ctrl-C, or any other exception in the wait, breaks them off."""
        pool = ThreadPoolExecutor(threads)
        try:
            futures = [pool.submit(function, item) for item in items]
            wait(futures)
        except BaseException:
            self._call.break_off()
            raise
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
        return [future.result() for future in futures]

    def close(self) -> None:
        """End what connects the trainer with the servers, which keep running."""
        for url in self._urls:
            self._transfer.drop(url)

    def metrics(self) -> Metrics:
        """Since the last call: requests issued again, answers refused; and the servers in use."""
        counts = {
            "sampler/reissued": float(self._reissued),
            "sampler/refused": float(self._refused),
            "sampler/servers": float(len(self._healthy)),
        }
        self._reissued = self._refused = 0
        return counts

    def _request(self, index: int, request: Request, sampling: Sampling) -> list[Completion]:
        """One request's completions from whichever server gives them."""
        body: dict[str, Any] = {"token_ids": list(request.ids)} | ({"model": _ADAPTER} if self._adapter else {})
        body["sampling_params"] = options.request_fields(request, sampling)
        for attempt in range(self._retries + 1):
            url, revivals = self._choose(index, attempt)
            try:
                answer = self._call(url + "/inference/v1/generate", body)
            except http.FAILURES as error:
                # A server that was restarted does not know the adapter: 404.
                if isinstance(error, http.HttpError) and error.code < 500 and error.code != 404:
                    self._give_up(f"{url} refuses the request: {error}")
                self._distrust(url, error, revivals)
                continue
            try:
                return self._completions(answer, request, sampling)
            except http.FAILURES as error:
                self._distrust(url, error, revivals, refused=1)
        self._give_up(f"a request failed {self._retries + 1} times; {self._reasons()}")

    def _completions(self, answer: Any, request: Request, sampling: Sampling) -> list[Completion]:
        """The completions of an answer; ValueError if it is not one to the request, or from other weights."""
        rows: list[tuple[list[int], list[float], str]] = []
        for choice in answer["choices"]:
            ids, content = choice["token_ids"], choice["logprobs"]["content"]
            spans = {span["version"] for span in choice["weight_versions"] or ()}
            if spans != {self._label}:
                raise ValueError(f"it sampled from the weights {', '.join(sorted(spans))}, not {self._label}")
            if [entry["token_id"] for entry in content] != ids:
                raise ValueError(f"its {len(content)} log-probs are not those of its {len(ids)} tokens")
            rows.append((ids, [float(entry["logprob"]) for entry in content], choice["finish_reason"]))
        return options.completions(rows, request, sampling, self.version or 0)

    def _sync_all(self) -> None:
        loaded = self._together(self._sync, self._urls, len(self._urls))
        self._healthy = [url for url, good in zip(self._urls, loaded, strict=True) if good]

    def _sync(self, url: str) -> bool:
        """Whether this server now has the current weights, and no key of older ones."""
        try:
            label, loads = self._held.pop(url, ("", 0))
            if restarted := self._probe(url) != label:
                self._transfer.drop(url)
                self._inspect(url)
            # What may still be sampled there was given up by an earlier call.
            self._call(url + "/pause?mode=abort", {})
            self._mark(url, self._claim)
            if restarted or loads != self._loads:
                self._give(url)
            if self._adapter is not None:
                adapter = {"lora_name": _ADAPTER, "lora_path": str(self._adapter), "load_inplace": True}
                self._call(url + "/v1/load_lora_adapter", adapter)
            if not self._call(url + "/reset_prefix_cache", {})["success"]:
                raise ValueError("it did not empty its prefix cache")
            self._confirm(url, self._claim)
            self._mark(url, self._label)
            self._call(url + "/resume", {})
            self._confirm(url, self._label)
        except http.FAILURES as error:
            self._why[url] = _cause(error)
            self._transfer.drop(url)
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
        """Have a server say that its weights are these."""
        self._call(url + "/update_weight_version", {"new_version": label})

    def _confirm(self, url: str, label: str) -> None:
        """ValueError if a server's weights became others since they were marked with this label.

        Two runs may load weights into one server at the same time. Whichever sees it says that the weights are
        nobody's, so that both refuse what is sampled from them. Only a whole sync of the other run between two
        requests of this one is not seen.
        """
        found = self._label_of(url, self._call.seconds)
        if found != label:
            self._mark(url, f"mixed, of {found} and {label}")
            self._call(url + "/resume", {})
            raise ValueError(f"its weights became {found} meanwhile: another run uses it, or it was restarted")

    def _choose(self, index: int, attempt: int) -> tuple[str, int]:
        """The server to ask; once one request has ended the run, none waits for the servers again."""
        with self._lock:
            if self._failure is not None:
                raise self._failure
            if self._call.over.is_set():
                raise EngineError("sampling has been broken off")
            self._reissued += attempt > 0
            if not self._healthy:
                self._revive()
            return self._healthy[(index + attempt) % len(self._healthy)], self._revivals

    def _give_up(self, text: str) -> NoReturn:
        self._failure = EngineError(text)
        raise self._failure

    def _distrust(self, url: str, error: Exception, revivals: int, refused: int = 0) -> None:
        """Leave a server out, unless it has come back since the request that failed was issued."""
        with self._lock:
            self._refused += refused
            self._why[url] = _cause(error)
            if revivals == self._revivals:
                self._healthy = [other for other in self._healthy if other != url]

    def _revive(self) -> None:
        """Wait for a server to come back and take the current weights; EngineError if none does in time."""
        self._revivals += 1
        until = time.monotonic() + self._restart
        while not self._healthy:
            self._sync_all()
            if not self._healthy and (self._hurried.is_set() or time.monotonic() > until):
                self._give_up(f"no vLLM server is left; {self._reasons()}")
            if not self._healthy and self._call.over.wait(min(1.0, self._restart)):
                self._give_up("sampling has been broken off")

    def hurry(self) -> None:
        """Wait no more for servers to come back: the run is to stop, and they may be stopping too."""
        self._hurried.set()

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {self._why[url]}" for url in self._urls if url in self._why)

    def _greet(self, url: str) -> None:
        """Leave out, for now, what is no vLLM server of a version that is known to work, with replaceable weights."""
        try:
            self._probe(url)
            self._inspect(url)
        except http.HttpError as error:
            self._why[url] = f"{error}; start it with `retrain serve`, which sets VLLM_SERVER_DEV_MODE=1"
        except http.FAILURES as error:
            self._why[url] = f"{_cause(error)}; start it with `retrain serve`, or correct [vllm] urls"

    def _probe(self, url: str) -> str:
        """The label of the weights that a server has. It comes from the process that samples, which may hang alone."""
        seconds = min(_PROBE_S, self._call.seconds)
        found = str(self._call(f"{url}/version", None, seconds)["version"])
        if not found.startswith(_VERSIONS):
            raise ValueError(f"it is vLLM {found}; versions 0.32 and 0.33 are known to work")
        return self._label_of(url, seconds)

    def _label_of(self, url: str, seconds: float) -> str:
        return str(self._call(f"{url}/weight_info", None, seconds)["weight_version"])

    def _inspect(self, url: str) -> None:
        """ValueError for a server that was started without what this run needs of it."""
        seconds = min(_INSPECTION_S, self._call.seconds)
        config = self._call(url + "/server_info?config_format=json", None, seconds)["vllm_config"]
        backend = (config["weight_transfer_config"] or {"backend": "file"})["backend"]
        if self._backend not in ("file", backend):
            raise ValueError(f'it was started with transfer = "{backend}", not "{self._backend}"')
        if self.takes_adapters and not config["lora_config"]:
            raise ValueError(
                f"it was started without room for adapters; start it again for this run, or {options.MERGE}"
            )
        if self.takes_adapters and (room := config["lora_config"]["max_lora_rank"]) < self._rank:
            raise ValueError(f"it was started for adapters of rank {room} at most, and [model.lora] r is {self._rank}")
        self._models[url] = config["model_config"]


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
