"""Transfer of the trainer's weights to vLLM servers: by a shared file, or by vLLM from GPU to GPU."""

from __future__ import annotations

import base64
import importlib
import pickle
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar
from urllib.parse import urlsplit

from retrain.engines.vllm.isolation import Isolation
from retrain.errors import EngineError
from retrain.registry import find
from retrain.system import http_client as http
from retrain.system.files import staged, writing

if TYPE_CHECKING:
    from torch import Tensor, device

Name = Literal["file", "nccl", "ipc"]
"""`file`: through a shared file. `nccl`: between different GPUs. `ipc`: on the same GPU."""
DEVICES = {"cuda"}
"""Devices from which vLLM's transfer can send weights."""
_SHUTDOWN_S = 10.0
_IMPORT_ENVIRONMENT = {
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_LOGGING_STREAM": "ext://sys.stderr",
}
"""Environment variables while vLLM is imported: no usage statistics, only errors in the log."""
_T = TypeVar("_T")


class FileTransfer:
    """Writes the weights to a file that every server reads.

    Args:
        folder: directory of the file.
        calls: HTTP client for the servers; its timeout covers the loading of weights.
    """

    def __init__(self, folder: Path, calls: http.Calls) -> None:
        self._folder, self._call = folder, calls

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Write a full state dict atomically.

        Raises:
            StorageError: the file cannot be written; the previous file is kept.
        """
        from safetensors.torch import save_file

        path = self._folder / "model.safetensors"
        # Copies, because safetensors refuses tensors that share memory, as tied weights do.
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}
        with writing(path), staged(path, durable=False) as stage:
            save_file(copies, stage)

    def give(self, url: str) -> None:
        """Make a server read the file."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        self._call(f"{url}/collective_rpc", load)

    def drop(self, url: str) -> None:
        """Do nothing: there is no connection to close."""


class NativeTransfer:
    """Sends weights with vLLM's transfer between GPUs, in one process group per server.

    Because groups are separate, a failed server does not affect the others. Everything that may wait
    for a server runs in a thread with a deadline. After the deadline, the thread is abandoned: its
    HTTP calls fail, and its group is aborted, which ends the waiting GPU operations. Only the
    initialisation of a group cannot be aborted; its daemon thread stays until the process exits.

    Args:
        name: "nccl" or "ipc".
        from_device: device of the trainer's weights.
        calls: as in `FileTransfer`.
    Raises:
        MissingExtraError: vLLM is not installed in the trainer's environment.
        EngineError: the trainer's weights are not on a GPU, or vLLM cannot be imported.
    """

    def __init__(self, name: Name, from_device: device, calls: http.Calls) -> None:
        find("engine", "vllm").require_extra()
        if from_device.type not in DEVICES:
            raise EngineError(
                f'[vllm] transfer = "{name}" sends weights from GPU to GPU, and the trainer is on {from_device.type}; '
                'use transfer = "file"'
            )
        self._name, self._device, self._call = name, from_device, calls
        self._links: dict[str, _Client] = {}
        self._one_at_a_time = threading.Lock()
        try:
            with Isolation(_IMPORT_ENVIRONMENT)():
                self._library = importlib.import_module("vllm.distributed.weight_transfer")
                self._engine = importlib.import_module(f"vllm.distributed.weight_transfer.{name}_engine")
        except Exception as error:
            raise EngineError(f"vllm cannot be imported ({error}); check it with `retrain doctor`") from error
        self._weights: dict[str, Tensor] = {}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full state dict.

        A copy is needed because a restarted server may request these weights after the trainer has changed its own.
        """
        import torch

        self._weights = {}  # free the old copy first: memory may not suffice for both
        self._weights = {name: value.detach().clone().contiguous() for name, value in weights.items()}
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # other threads and streams read the copies

    def give(self, url: str) -> None:
        """Send the weights to a server, and initialise a group on first use.

        Raises:
            http.FAILURES: the transfer failed (one of these exceptions); the group is aborted.
        """
        with self._one_at_a_time:  # groups that share a GPU could deadlock
            link = self._links.setdefault(url, _Client(url, self._call))
            try:
                within(self._call.seconds, lambda: self._send(url, link), self._call.aborted)
            except http.FAILURES:
                self.drop(url)
                raise
            except Exception as error:  # NCCL, torch and vLLM raise exceptions of their own
                self.drop(url)
                raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def drop(self, url: str) -> None:
        """Abort the group of a server, if it has one."""
        if (link := self._links.pop(url, None)) is None:
            return
        link.closed = True
        if link.engine is not None:
            with suppress(Exception):
                within(_SHUTDOWN_S, link.engine.shutdown)

    def _send(self, url: str, link: _Client) -> None:
        import torch

        if self._device.type == "cuda":
            torch.cuda.set_device(self._device)  # the current device is a setting of each thread
        if link.engine is None:
            link.engine = self._init_group(url, link)
        link.engine.send_weights()

    def _init_group(self, url: str, client: _Client) -> Any:
        """Initialise a group with a server and return vLLM's trainer side of it.

        An earlier trainer may have left an unfinished weight update on the server; it is ended first.
        """
        client.reset()
        workers = int(self._call(f"{url}/get_world_size")["world_size"])
        if self._name == "ipc":
            info = self._engine.IPCTrainerInitInfo(rank=0)
        else:  # the trainer is rank 0 of a group with the server's workers
            info = self._engine.NCCLTrainerInitInfo(*_rendezvous(url), workers + 1, rank=0)
        factory = self._library.WeightTransferTrainerFactory
        return factory.trainer_init(info, client=client, source=self._source())

    def _source(self) -> Any:
        """Return the weights of the last `take` as vLLM's `WeightSource`, tied entries included."""
        base, taken = self._library, self

        class PolicySource(base.WeightSource):  # the base class comes from an optional dependency
            def metadata(self) -> list[Any]:
                return [base.ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(taken._weights.items())

        return PolicySource()


def transfer(name: Name, folder: Path, from_device: device, calls: http.Calls) -> FileTransfer | NativeTransfer:
    """Return the transfer of this name. Its `give` raises only `http.FAILURES`."""
    return FileTransfer(folder, calls) if name == "file" else NativeTransfer(name, from_device, calls)


class _Client:
    """HTTP client that vLLM's trainer side uses to control a server; every call has a timeout.

    Attributes:
        engine: the trainer's side of the group with the server; None before it is initialised.
        closed: every further call fails, so that an abandoned thread cannot disturb the next transfer.
    """

    def __init__(self, url: str, calls: http.Calls) -> None:
        self._url, self._call, self.closed = url, calls, False
        self.engine: Any = None

    def reset(self) -> None:
        """End an unfinished update, so that its partly loaded layers do not take weights of the next, and the server's
        side of the transfer."""
        with suppress(http.HttpError):
            self.start_weight_update()  # the server rejects this while an update is open
        self.finish_weight_update()
        self._post("shutdown_weight_transfer_engine", {})

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        body = dict(update_info)
        if (handles := body.pop("ipc_handles", None)) is not None:
            # JSON cannot hold the handles themselves.
            body["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._post("update_weights", {"update_info": body})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        if self.closed:
            raise ConnectionError("the transfer has been abandoned")
        self._call(f"{self._url}/{path}", body)


def within(seconds: float, function: Callable[[], _T], over: threading.Event | None = None) -> _T:
    """Call a function in a thread and return its result.

    Args:
        seconds: time limit.
        function: the function.
        over: event that ends the wait early.
    Raises:
        TimeoutError: the function took longer than `seconds`; its thread is abandoned.
        ConnectionAbortedError: `over` was set.
    """
    answer: Future[_T] = Future()

    def go() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    # A daemon: an abandoned call must not keep the process from ending.
    threading.Thread(target=go, daemon=True).start()
    until = time.monotonic() + seconds
    while not (over is not None and over.is_set()):
        left = until - time.monotonic()
        # A second at most, so that the event is seen soon.
        if answer in wait([answer], max(0.0, min(1.0, left))).done:
            return answer.result()
        if left <= 0:
            raise TimeoutError(f"not done within {seconds:g} seconds")
    raise ConnectionAbortedError("aborted")


def _rendezvous(url: str) -> tuple[str, int]:
    """Return an address of this machine that the server can reach, and a free port."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((target.hostname or "", target.port or 80))  # selects a route without sending anything
        address = route.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
