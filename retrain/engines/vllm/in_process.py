"""vLLM in the trainer's process, which gets weights as tensors, without files or sockets."""

from __future__ import annotations

import asyncio
import importlib
import warnings
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

from pydantic import Field

from retrain.engines.capability import base_model, check_weights, full_shapes
from retrain.engines.vllm import vllm_options as options
from retrain.engines.vllm.isolation import Isolation
from retrain.errors import EngineError
from retrain.protocols import Sampler, tolerance_of
from retrain.registry import engine
from retrain.system import event_loop
from retrain.types import Completion, Request, Sampling

if TYPE_CHECKING:
    from torch import Tensor

_VARIABLES = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # in this process the engine can read the trainer's tensors
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # the trainer decides on threads and CPU affinity
}
_ADVICE = (
    "check the installation with `retrain doctor`: `vllm` (for GPUs) and `vllm-cpu` share one package directory, so "
    "uninstall one of them; install a torchvision that was built for your torch"
)


class _PendingRequest(NamedTuple):
    """A request whose completions are awaited."""

    request: Request
    sampling: Sampling
    future: asyncio.Future[list[Completion]]


@engine("vllm", own_process_group=True, extra=("vllm", "vllm"), check=options.check_table, adapters=options.ADAPTERS)
class VllmEngine(Sampler):
    """Samples with vLLM in this process; weights are replaced in place after every step.

    vLLM reads the model's architecture from a configuration in `run_dir/vllm`. Weights come from
    `load_weights` and `load_adapter` only, so completions never come from weights other than the
    trainer's. Log-probs are those of the sampling distribution, in float32: tempered, and truncated
    by top_k and top_p. At temperature 0 tokens are greedy, and the log-probs are those of
    temperature 1. The prefix cache is emptied before a call unless the previous call had the same
    weights and the same `sampling`, as the turns of an episode have. Results therefore depend on
    the weights, the prompts and the seed, and not on earlier calls.

    Args:
        model: a transformers causal LM; only its configuration and its weights' names and shapes are read.
        seed: seed of vLLM's own random generators; completions use the seed of each call.
        device: device of the trainer; on a CPU vLLM runs without compilation.
        run_dir: directory of the run; the configuration is written to its subdirectory `vllm`.
        trainer_dtype: data type of the trainer's matrix products.
        dtype: data type of vLLM's weights and matrix products. "auto" is the trainer's, `[model]
            dtype`, so that both round alike.
        gpu_memory_utilization: share of a GPU's memory for vLLM, weights and cache together; the
            trainer needs the rest.
        kv_cache_mb: memory of the key-value cache, in MB; unset, the rest of gpu_memory_utilization
            on a GPU and 256 on a CPU.
        max_model_len: longest prompt with its completion, in tokens; unset, the model's limit or
            the memory's, whichever is smaller.
        tensor_parallel_size: number of GPUs that share the model.
        enforce_eager: do not use CUDA graphs: slower sampling, faster start, less memory.
        quantization: vLLM's name of a quantization applied when weights are loaded, such as "fp8";
            raise `[rollout] parity_tolerance` with it.
        sleep: release the GPU's memory after every call; weights are moved to the CPU's memory.
        lora: "adapter" loads a small adapter file after every step, on a base that is loaded once.
            "merged" loads merged weights after every step; in bfloat16 this loses updates smaller
            than a weight's last digit. Unset, "adapter" if vLLM supports adapters for the
            architecture in this dtype.

    Attributes:
        takes_adapters: True if weights are a base from `load_weights` and an adapter from `load_adapter`.
        version: version of the weights in use; None before the first ones are loaded.
        tolerance: largest mean difference per token from the trainer's log-probs, in nats, that
            rounding can explain.
        max_model_len: largest number of tokens of a prompt with its completion.
    """

    def __init__(  # noqa: PLR0913 - its keyword-only parameters are its table
        self,
        model: Any,
        seed: int,
        device: Any,
        run_dir: Path,
        trainer_dtype: str,
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
            raise EngineError("[vllm] sleep = true releases GPU memory and this run uses a CPU; remove it")
        self._isolated, self._expected = Isolation(_VARIABLES), full_shapes(base_model(model))
        self._sleeps, self._asleep = sleep, False
        table: dict[str, Any] = {
            "dtype": options.resolved(dtype, trainer_dtype),
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
        self._pending, self._abandoned = list[_PendingRequest](), list[str]()
        self._steps: asyncio.Task[None] | None = None
        self._llm: Any = None
        self.max_model_len = 0.0
        self._start()

    def describe(self) -> str:
        """Describe the engine in one line."""
        limit = f"up to {self.max_model_len} tokens per completion with its prompt"
        merged = f", LoRA merged and rounded to {self._dtype}" if self._merges else ""
        return f"vLLM {_vllm().__version__}, {self._dtype}{merged}, {limit}"

    def _serves_adapters(self, model: Any, cpu: bool) -> bool:
        """Return True if vLLM supports adapters for the architecture in this dtype.

        On a GPU it does not support float32 adapters, which is harmless: float32 merges exactly.
        """
        if self._dtype == "float32" and not cpu:
            return False
        with self._isolated():
            models = _vllm("model_executor.models")
            architecture = models.ModelRegistry.models.get(type(base_model(model)).__name__)
            return architecture is not None and models.supports_lora(architecture.load_model_cls())

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Replace the weights in place by a full state dict, which is the base if the engine takes adapters.

        Raises:
            EngineError: names or shapes do not fit the model (the old weights stay in use), or vLLM
                failed to load them even after a restart (then it has no weights).
        """
        check_weights(self._expected, weights)
        self.version = self._cached = failure = None
        # The second attempt restarts vLLM, whose state after a failed reload is unknown.
        for _ in range(2):
            try:
                self._reload(weights)
            except Exception as error:  # a partial reload leaves the engine unusable
                failure = error
                self.close()
            else:
                self._has_base = True
                self.version = None if self.takes_adapters else version
                return
        raise EngineError(f"vLLM cannot load the weights of step {version} ({_line(failure)})") from failure

    def load_adapter(self, folder: Path, version: int) -> None:
        """Replace the adapter in place by the one in this folder, in PEFT's format.

        Raises:
            EngineError: there is no base yet, or vLLM cannot load the adapter. Sampling then fails
                until an adapter is loaded.
        """
        if not self._has_base:
            raise EngineError("the sampler has no base for an adapter: call load_weights first")
        self.version = self._cached = None
        request = _vllm("lora.request").LoRARequest
        self._adapter = request("policy", 1, str(folder))
        try:
            with self._isolated():
                self._wake()
                self._llm.llm_engine.add_lora(request("policy", 1, str(folder), load_inplace=True))
        except Exception as error:  # some layers may now have the new adapter and others the old one
            raise EngineError(f"vLLM cannot load the adapter of step {version} ({_line(error)})") from error
        self.version = version

    def sample(self, requests: Sequence[Request], sampling: Sampling) -> list[list[Completion]]:
        """Return the completions of every request, in the order of the requests."""
        return event_loop.run(event_loop.gather(self.generate(request, sampling) for request in requests))

    async def generate(self, request: Request, sampling: Sampling) -> list[Completion]:
        """Return the completions of one request. vLLM accepts new requests between any two tokens."""
        pending = _PendingRequest(request, sampling, asyncio.get_running_loop().create_future())
        self._pending.append(pending)
        steps = self._steps = self._steps or asyncio.create_task(self._keep_stepping())
        try:
            return await pending.future
        except asyncio.CancelledError:
            steps.cancel()
            raise

    async def _keep_stepping(self) -> None:
        """Sample token by token, in the thread that waits in `event_loop.run`, until no request is left."""
        new, running = list[_PendingRequest](), dict[str, _PendingRequest]()
        try:
            while self._pending or running:
                # Requests that arrive during a step wait for the next one.
                new, self._pending = self._pending, []
                for number, completions in await event_loop.call_in_caller(partial(self._step, new, running)):
                    _answer(running.pop(number), completions)
        except Exception as error:
            for pending in (*running.values(), *new, *self._pending):
                _answer(pending, error)
            self._pending = []
        finally:
            self._steps, self._abandoned = None, [*running]

    def _step(
        self, new: Sequence[_PendingRequest], running: dict[str, _PendingRequest]
    ) -> list[tuple[str, list[Completion]]]:
        """Add the new requests and sample one token of every running one; return the finished ones."""
        event_loop.check_stop()
        with self._isolated():
            for pending in new:
                version = options.check([pending.request], pending.sampling, self.version, self.max_model_len)
                self._begin(version, pending.sampling)
                with _sampling():
                    running[self._add(pending)] = pending
            with _sampling():
                results = [result for result in self._llm.llm_engine.step() if result.finished] if running else []
            answers = [(result.request_id, self._completions(result, running[result.request_id])) for result in results]
            # The last request is answered; nobody needs the GPU until the next.
            if len(answers) == len(running):
                self._sleep()
        return answers

    def _add(self, pending: _PendingRequest) -> str:
        """Add a request to vLLM, abort those whose callers were cancelled, and return the request's id."""
        engine, number = self._llm.llm_engine, str(next(self._llm.request_counter))
        if self._abandoned:
            engine.abort_request(self._abandoned)
            self._abandoned = []
        [fields] = _parameters([pending.request], pending.sampling)
        engine.add_request(number, {"prompt_token_ids": [*pending.request.ids]}, fields, lora_request=self._adapter)
        return number

    def _completions(self, result: Any, pending: _PendingRequest) -> list[Completion]:
        version = self.version or 0
        rows = [(output.token_ids, output.logprobs.logprobs, output.finish_reason) for output in result.outputs]
        if any(score != score for _, logprobs, _ in rows for score in logprobs):
            self.close()  # the key-value cache would keep the NaNs under the next weights
            raise EngineError(f"the log-probs are not numbers: the weights of version {version} are not finite")
        return options.completions(rows, pending.request, pending.sampling, version)

    def _begin(self, version: int, sampling: Sampling) -> None:
        """Wake vLLM, and empty its prefix cache unless the last request had the same weights and `sampling`."""
        self._wake()
        # The turns of an episode have one `sampling` and reuse the keys and values of earlier turns.
        if self._cached != (version, sampling) and not self._llm.reset_prefix_cache():
            raise EngineError("vLLM did not empty its prefix cache, which may contain keys of old weights")
        self._cached = version, sampling

    def close(self) -> None:
        """Shut the engine down and release its memory."""
        if self._llm is None:
            return
        with self._isolated():
            self._llm.llm_engine.engine_core.shutdown()
            self._llm = self.version = None
            self._has_base = False
            _vllm("distributed.parallel_state").cleanup_dist_env_and_memory()

    def _start(self) -> Any:
        """Start the engine and sample one token, so that errors appear before the first step."""
        try:
            with self._isolated(), warnings.catch_warnings(action="ignore"):
                platform = _vllm("platforms").current_platform
                if platform.is_cpu():
                    platform.simple_compile_backend = "eager"  # compiling two helpers takes half a minute
                self._llm = _vllm().LLM(**self._options)
                fields = _parameters([Request((0,), count=1, max_tokens=1, stream=0)], Sampling())
                self._llm.generate([{"prompt_token_ids": [0]}], fields, use_tqdm=False)
                self.max_model_len = int(self._llm.llm_engine.model_config.max_model_len)
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
        """Put vLLM to sleep at level 1, which keeps the weights; level 2 would discard them."""
        if self._sleeps:
            self._llm.sleep(level=1)
            self._asleep = True


def _vllm(module: str = "") -> Any:
    """Import vLLM, an optional dependency, or one of its modules."""
    return importlib.import_module(f"vllm.{module}" if module else "vllm")


@contextmanager
def _sampling() -> Generator[None]:
    """Convert exceptions of vLLM to EngineError."""
    try:
        yield
    except Exception as error:
        raise EngineError(f"vLLM failed to sample ({_line(error)})") from error


def _answer(pending: _PendingRequest, answer: list[Completion] | Exception) -> None:
    """Set the result of a request, or its exception."""
    if pending.future.done():  # the caller has been cancelled
        return
    if isinstance(answer, Exception):
        pending.future.set_exception(answer)
    else:
        pending.future.set_result(answer)


def _parameters(requests: Sequence[Request], sampling: Sampling) -> list[Any]:
    whole = {"output_kind": _vllm("sampling_params").RequestOutputKind.FINAL_ONLY}
    return [_vllm().SamplingParams(**options.request_fields(request, sampling), **whole) for request in requests]


def _line(error: Exception | None) -> str:
    """Format an exception in one line."""
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
