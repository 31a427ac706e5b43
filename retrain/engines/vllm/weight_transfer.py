"""How the trainer's weights reach vLLM servers: in a file that both see, or by vLLM's own transfer between GPUs."""

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
"""`file`: both see the same path. `nccl`: the servers have other GPUs than the trainer. `ipc`: the same GPU."""
DEVICES = {"cuda"}
"""Where weights must be that vLLM's own transfer takes."""
_SHUTDOWN_S = 10.0
_VARIABLES = {"VLLM_NO_USAGE_STATS": "1", "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_LOGGING_STREAM": "ext://sys.stderr"}
_T = TypeVar("_T")


class FileTransfer:
    """Writes the weights once, for every server to read.

    Args:
        folder: where the file is written.
        calls: to the servers; their deadline is that for all that one server takes to load weights.
    """

    def __init__(self, folder: Path, calls: http.Calls) -> None:
        self._folder, self._call = folder, calls

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Write a full state dict, and only then put it in the place of the last one.

        Raises:
            StorageError: it cannot be written; the last one stays, and nothing of this one.
        """
        from safetensors.torch import save_file

        path = self._folder / "model.safetensors"
        copies = {name: value.detach().to("cpu", copy=True).contiguous() for name, value in weights.items()}
        with writing(path), staged(path, durable=False) as stage:
            save_file(copies, stage)

    def give(self, url: str) -> None:
        """Have a server read it."""
        load = {"method": "reload_weights", "kwargs": {"weights_path": str(self._folder)}}
        self._call(f"{url}/collective_rpc", load)

    def drop(self, url: str) -> None:
        """Nothing connects them."""


class NativeTransfer:
    """vLLM's own transfer between GPUs, with one group per server: one that fails takes no other with it.

    All that may wait for a server runs in a thread with a deadline. A thread that is past it is left behind: its
    requests are refused and its group is aborted, which ends what waits on the GPU. Only the meeting of a new
    group cannot be aborted; its thread stays until the process ends, and does not keep it from ending.

    Args:
        name: "nccl" or "ipc".
        place: where the trainer's weights are.
        calls: as of `FileTransfer`.
    Raises:
        MissingExtraError: vLLM is not installed in the trainer's environment.
        EngineError: the trainer's weights are not on a GPU, or vLLM cannot be imported.
    """

    def __init__(self, name: Name, place: device, calls: http.Calls) -> None:
        find("engine", "vllm").require_extra()
        if place.type not in DEVICES:
            raise EngineError(
                f'[vllm] transfer = "{name}" hands weights from GPU to GPU, and the trainer is on {place.type}; '
                'use transfer = "file"'
            )
        self._name, self._place, self._call = name, place, calls
        self._links: dict[str, _Client] = {}
        self._one_at_a_time = threading.Lock()
        try:
            with Isolation(_VARIABLES)():
                self._library = importlib.import_module("vllm.distributed.weight_transfer")
                self._engine = importlib.import_module(f"vllm.distributed.weight_transfer.{name}_engine")
        except Exception as error:
            raise EngineError(f"vllm cannot be imported ({error}); check it with `retrain doctor`") from error
        self._weights: dict[str, Tensor] = {}

    def take(self, weights: Mapping[str, Tensor]) -> None:
        """Copy a full state dict: the trainer changes its own while a server that has come back still needs these."""
        import torch

        self._weights = {}  # no room for three
        self._weights = {name: value.detach().clone().contiguous() for name, value in weights.items()}
        if self._place.type == "cuda":
            torch.cuda.synchronize(self._place)  # they are read from other threads and streams

    def give(self, url: str) -> None:
        """Send a server the weights, after meeting it if this is the first time or the last one failed."""
        with self._one_at_a_time:  # groups that share a GPU could wait for each other
            link = self._links.setdefault(url, _Client(url, self._call))
            try:
                within(self._call.seconds, lambda: self._send(url, link), self._call.over)
            except http.FAILURES:
                self.drop(url)
                raise
            except Exception as error:  # NCCL, torch and vLLM have their own
                self.drop(url)
                raise ConnectionError(f"{type(error).__name__}: {error}") from error

    def drop(self, url: str) -> None:
        """Abort the group of a server."""
        if (link := self._links.pop(url, None)) is None:
            return
        link.closed = True
        if link.engine is not None:
            with suppress(Exception):
                within(_SHUTDOWN_S, link.engine.shutdown)

    def _send(self, url: str, link: _Client) -> None:
        import torch

        if self._place.type == "cuda":
            torch.cuda.set_device(self._place)  # every thread has its own
        if link.engine is None:
            link.engine = self._meet(url, link)
        link.engine.send_weights()

    def _meet(self, url: str, client: _Client) -> Any:
        """vLLM's end of a new group with a server, on which an earlier trainer may have left an update half done."""
        client.reset()
        workers = int(self._call(f"{url}/get_world_size")["world_size"])
        if self._name == "ipc":
            met = self._engine.IPCTrainerInitInfo(rank=0)
        else:  # the trainer is rank 0 of a group with the server's workers
            met = self._engine.NCCLTrainerInitInfo(*_meeting_place(url), workers + 1, rank=0)
        factory = self._library.WeightTransferTrainerFactory
        return factory.trainer_init(met, client=client, source=self._source())

    def _source(self) -> Any:
        """The weights of the last `take` as vLLM reads them: all of the state dict, tied entries as well."""
        base, taken = self._library, self

        class PolicySource(base.WeightSource):  # a class of an extra, which is imported where it is used
            def metadata(self) -> list[Any]:
                return [base.ParamMeta(name, value.dtype, tuple(value.shape)) for name, value in self]

            def __iter__(self) -> Iterator[tuple[str, Tensor]]:
                return iter(taken._weights.items())

        return PolicySource()


def transfer(name: Name, folder: Path, place: device, calls: http.Calls) -> FileTransfer | NativeTransfer:
    """What gives servers the weights of the last `take`; its failures are `http.FAILURES`."""
    return FileTransfer(folder, calls) if name == "file" else NativeTransfer(name, place, calls)


class _Client:
    """What vLLM's side of the trainer asks a server for, every call with a deadline.

    Attributes:
        engine: the trainer's end of the group with the server, once they have met.
        closed: nothing is asked any more: a thread that was left behind must not disturb the next transfer.
    """

    def __init__(self, url: str, calls: http.Calls) -> None:
        self._url, self._call, self.closed = url, calls, False
        self.engine: Any = None

    def reset(self) -> None:
        """End an update that was broken off: the layers it had begun would take the next weights for its own."""
        with suppress(http.HttpError):
            self.start_weight_update()  # refused while an update is open
        self.finish_weight_update()
        self._post("shutdown_weight_transfer_engine", {})

    def init_weight_transfer_engine(self, init_info: Mapping[str, Any]) -> None:
        self._post("init_weight_transfer_engine", {"init_info": init_info})

    def start_weight_update(self) -> None:
        self._post("start_weight_update", {})

    def update_weights(self, update_info: Mapping[str, Any]) -> None:
        body = dict(update_info)
        if (handles := body.pop("ipc_handles", None)) is not None:
            body["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._post("update_weights", {"update_info": body})

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._post("finish_weight_update", {"weight_version": weight_version})

    def _post(self, path: str, body: Mapping[str, Any]) -> None:
        if self.closed:
            raise ConnectionError("the transfer has been given up")
        self._call(f"{self._url}/{path}", body)


def within(seconds: float, function: Callable[[], _T], over: threading.Event | None = None) -> _T:
    """The result of a function, or TimeoutError; a thread that is late is left behind.

    Args:
        over: once it is set nobody waits for the function any longer.
    """
    answer: Future[_T] = Future()

    def go() -> None:
        try:
            answer.set_result(function())
        except BaseException as error:
            answer.set_exception(error)

    threading.Thread(target=go, daemon=True).start()
    until = time.monotonic() + seconds
    while not (over is not None and over.is_set()):
        left = until - time.monotonic()
        if answer in wait([answer], max(0.0, min(1.0, left))).done:
            return answer.result()
        if left <= 0:
            raise TimeoutError(f"not done within {seconds:g} seconds")
    raise ConnectionAbortedError("broken off")


def _meeting_place(url: str) -> tuple[str, int]:
    """An address of this machine that the server reaches, and a port that is free there."""
    target = urlsplit(url)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect((target.hostname or "", target.port or 80))  # sends nothing
        address = route.getsockname()[0]
    with socket.socket() as free:
        free.bind((address, 0))
        return address, free.getsockname()[1]
