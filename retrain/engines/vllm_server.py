"""vLLM in processes of its own, over HTTP: as many servers as there are, and any of them may die."""

from __future__ import annotations

import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from retrain.engines.capability import base_model, tolerance_of
from retrain.engines.vllm_engine import full_shapes, request_fields, write_config
from retrain.errors import EngineError
from retrain.registry import engine
from retrain.types import Completion, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_VERSIONS = ("0.32.", "0.33.")
_AT_ONCE = 64
"""Requests in flight; a server batches what it has."""
_FAILURES = (OSError, HTTPException, ValueError, KeyError, TypeError)
"""What a dead, hanging or confused server shows as."""


@engine("vllm-server", table="vllm_server")
class VllmServerEngine:
    """Samples from `vllm serve` processes, which take new weights from a file that they and the trainer both see.

    Every prompt is a request with a time limit. A server that fails, hangs, or answers with other weights than
    asked for is not asked again before it has taken the current weights; its requests go to the others, or to
    itself once it is back.

    The servers are the user's to start, with VLLM_SERVER_DEV_MODE=1 for the endpoints that replace weights. Those
    ask for no password: bind servers to loopback or a private network.

    Args:
        model: a transformers causal LM: the names and shapes of its weights.
        run_dir: weights are handed over in `run_dir/vllm`.
        urls: of the servers, such as "http://127.0.0.1:8000".
        request_timeout_s: for one prompt's completions, and for loading weights.
        restart_timeout_s: how long to wait for a server to come back when there is none left.
        retries: how often a request is issued again before the run ends.

    Attributes:
        version: of the weights in force; None until there are any.
        tolerance: mean difference per token from the trainer's log-probs, in nats, that bfloat16 explains.
    """

    def __init__(
        self,
        model: Any,
        run_dir: Path,
        *,
        urls: Annotated[list[str], Field(min_length=1)],
        request_timeout_s: Annotated[float, Field(gt=0)] = 600.0,
        restart_timeout_s: Annotated[float, Field(gt=0)] = 120.0,
        retries: Annotated[int, Field(ge=0)] = 3,
    ) -> None:
        self._urls = [url.rstrip("/") for url in urls]
        self._timeout, self._restart, self._retries = request_timeout_s, restart_timeout_s, retries
        self._expected = full_shapes(base_model(model))
        self._folder = Path(write_config(base_model(model), run_dir / "vllm")).resolve()
        self._label = ""
        self._healthy: list[str] = []
        self._revivals = 0
        self._why: dict[str, str] = {}
        self._lock = threading.Lock()
        # No proxy of the environment stands between the trainer and its servers.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self.tolerance = tolerance_of("bfloat16")
        self.version: int | None = None
        for url in self._urls:
            self._greet(url)

    def describe(self) -> str:
        """Which servers sample, in words."""
        return f"vLLM servers at {', '.join(self._urls)}"

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Have every server load a full state dict; one that fails is left out until it has loaded the current ones.

        Raises:
            EngineError: names or shapes are not the model's, or no server could load them.
        """
        from retrain.engines.embedded.general import check_weights

        check_weights(self._expected, weights)
        self.version = None
        self._label = f"{self._folder}@{version}"
        _write_weights(self._folder / "model.safetensors", weights)
        with ThreadPoolExecutor(len(self._urls)) as pool:
            loaded = list(pool.map(self._sync, self._urls))
        self._healthy = [url for url, good in zip(self._urls, loaded, strict=True) if good]
        if not self._healthy:
            self._revive()
        self.version = version

    def sample(self, prompts: Sequence[Sequence[int]], sampling: Sampling) -> list[list[Completion]]:
        """`sampling.group_size` completions for each prompt, in the prompts' order."""
        if self.version is None:
            raise EngineError("the sampler has no weights: call load_weights first")
        bodies = [
            {"token_ids": list(prompt), "sampling_params": fields}
            for prompt, fields in zip(prompts, request_fields(len(prompts), sampling), strict=True)
        ]
        with ThreadPoolExecutor(_AT_ONCE) as pool:
            return list(pool.map(lambda index: self._request(index, bodies[index], sampling), range(len(bodies))))

    def _request(self, index: int, body: Mapping[str, Any], sampling: Sampling) -> list[Completion]:
        """One prompt's completions from whichever server gives them."""
        for attempt in range(self._retries + 1):
            url, revivals = self._choose(index + attempt)
            try:
                return self._completions(self._call(url, "/inference/v1/generate", body), sampling)
            except urllib.error.HTTPError as error:
                if error.code < 500:
                    raise EngineError(
                        f"{url} refuses the request: {error.read(500).decode(errors='replace')}"
                    ) from None
                self._distrust(url, error, revivals)
            except _FAILURES as error:
                self._distrust(url, error, revivals)
        raise EngineError(f"a request failed {self._retries + 1} times; {self._reasons()}")

    def _completions(self, answer: Any, sampling: Sampling) -> list[Completion]:
        """The completions of an answer; ValueError if it is not one to the request, or from other weights."""
        rows: list[Completion] = []
        for choice in answer["choices"]:
            ids = tuple(choice["token_ids"])
            content = choice["logprobs"]["content"]
            spans = {span["version"] for span in choice["weight_versions"] or ()}
            if spans != {self._label}:
                raise ValueError(f"it sampled from the weights {', '.join(sorted(spans))}, not {self._label}")
            if tuple(entry["token_id"] for entry in content) != ids or choice["finish_reason"] not in (
                "stop",
                "length",
            ):
                raise ValueError(f"{len(ids)} tokens with {len(content)} log-probs, ended by {choice['finish_reason']}")
            logprobs = tuple(float(entry["logprob"]) for entry in content)
            rows.append(Completion(ids, logprobs, choice["finish_reason"], self.version or 0))
        if sampling.temperature == 0:
            rows *= sampling.group_size
        if len(rows) != sampling.group_size:
            raise ValueError(f"{len(rows)} completions instead of {sampling.group_size}")
        return rows

    def _sync(self, url: str) -> bool:
        """Whether this server now has the current weights, and no key of older ones."""
        try:
            self._call(url, "/pause?mode=wait", {})
            load = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
            self._call(url, "/collective_rpc", load)
            if not self._call(url, "/reset_prefix_cache", {})["success"]:
                raise ValueError("it did not empty its prefix cache")
            self._call(url, "/update_weight_version", {"new_version": self._label})
            self._call(url, "/resume", {})
        except _FAILURES as error:
            self._why[url] = _cause(error)
            return False
        return True

    def _choose(self, turn: int) -> tuple[str, int]:
        with self._lock:
            if not self._healthy:
                self._revive()
            return self._healthy[turn % len(self._healthy)], self._revivals

    def _distrust(self, url: str, error: Exception, revivals: int) -> None:
        """Leave a server out, unless it has come back since the request that failed was issued."""
        with self._lock:
            self._why[url] = _cause(error)
            if revivals == self._revivals:
                self._healthy = [other for other in self._healthy if other != url]

    def _revive(self) -> None:
        """Wait for a server to come back and take the current weights; EngineError if none does in time."""
        self._revivals += 1
        until = time.monotonic() + self._restart
        while not self._healthy:
            self._healthy = [url for url in self._urls if self._sync(url)]
            if not self._healthy and time.monotonic() > until:
                raise EngineError(f"no vLLM server is left; {self._reasons()}")
            if not self._healthy:
                time.sleep(min(1.0, self._restart))

    def _reasons(self) -> str:
        return "; ".join(f"{url}: {why}" for url, why in self._why.items())

    def _greet(self, url: str) -> None:
        """EngineError unless this is a vLLM server of a version that is known to work, with its weights replaceable."""
        if not url.startswith(("http://", "https://")):
            raise EngineError(f"[vllm_server] urls: {url!r} is no address; write http://HOST:PORT")
        try:
            found = str(self._call(url, "/version")["version"])
            self._call(url, "/weight_info")
        except urllib.error.HTTPError as error:
            raise EngineError(f"{url}{error.filename or ''}: {error}; start it with VLLM_SERVER_DEV_MODE=1") from error
        except _FAILURES as error:
            raise EngineError(
                f"no vLLM server answers at {url} ({_cause(error)}); start it, or correct urls"
            ) from error
        if not found.startswith(_VERSIONS):
            raise EngineError(f"{url} is vLLM {found}; versions 0.32 and 0.33 are known to work")

    def _call(self, url: str, path: str, body: Mapping[str, Any] | None = None) -> Any:
        """GET, or POST of a JSON body; the answer's JSON."""
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url + path, data, {"Content-Type": "application/json"})  # noqa: S310 - checked
        with self._opener.open(request, timeout=self._timeout) as response:
            text = response.read()
        return json.loads(text) if text else {}


def _write_weights(path: Path, weights: Mapping[str, Tensor]) -> None:
    """Write a full state dict, tied entries as well, and only then put it in the place of the last one."""
    from safetensors.torch import save_file

    written = path.with_suffix(".new")
    save_file({name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}, written)
    written.replace(path)


def _cause(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
