"""A CPU's way for vLLM's transfers between GPUs: what CUDA and NCCL do is replaced, and all of vLLM around it is real.

`register` runs in the trainer (the test) and, as a plug-in of vLLM (`plugin`), in every process of a server.
NCCL's broadcasts go through the store where its members meet; memory shared between processes is a file.
"""

import importlib
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch


class Communicator:
    """vLLM's communicator over NCCL, without NCCL."""

    def __init__(self, group, device):
        self.group = group

    def broadcast(self, tensor, src):
        tensor.copy_(self.group.broadcast_obj(tensor, src))

    def destroy(self):
        del self.group


def send(iterator, group, src, post_iter_func, **sizes):
    for item in iterator:
        group.broadcast(post_iter_func(item), src)


def receive(iterator, group, src, post_unpack_func, **sizes):
    for name, (shape, dtype) in iterator:
        tensor = torch.empty(shape, dtype=dtype)
        group.broadcast(tensor, src)
        post_unpack_func([(name, tensor)])


def share(tensor):
    """(function, arguments) as `reduce_tensor` gives them; the seventh argument is the device."""
    with tempfile.NamedTemporaryFile(prefix="shared-", delete=False) as file:
        torch.save(tensor, file)
    return None, (file.name, *[None] * 5, 0)


def rebuild(path, *others):
    tensor = torch.load(path)
    Path(path).unlink()
    return tensor


def register(replace=setattr):
    """Replace what needs a GPU."""
    transfer = "vllm.distributed.weight_transfer"
    pynccl = importlib.import_module("vllm.distributed.device_communicators.pynccl")
    nccl, ipc = (importlib.import_module(f"{transfer}.{name}_engine") for name in ("nccl", "ipc"))
    replace(pynccl, "PyNcclCommunicator", Communicator)
    replace(nccl, "packed_nccl_broadcast_producer", send)
    replace(nccl, "packed_nccl_broadcast_consumer", receive)
    replace(ipc, "reduce_tensor", share)
    replace(ipc, "rebuild_cuda_tensor", rebuild)
    replace(torch.accelerator, "current_device_index", lambda: 0)
    replace(torch.accelerator, "synchronize", lambda device=None: None)
    replace(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid="cpu"))
    replace(torch.cuda, "ipc_collect", lambda: None)


def plugin(folder: Path) -> Path:
    """A folder that, on PYTHONPATH, has vLLM call `register` in every process that it starts."""
    info = folder / "cpu_transfer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu_transfer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\ncpu_transfer = tests.vllm.cpu_transfer:register\n")
    return folder
