"""A model computes the same values and gradients from fewer operations; freed memory is used again."""

import copy
import gc
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from retrain.training.cpu_kernels import shorten, unscanned_heap
from tests.training.small_models import MODELS, make_batch, make_model

pytestmark = pytest.mark.numeric


def shortened(model):
    fewer = copy.deepcopy(model)
    shorten(fewer)
    return fewer


def loss_and_gradients(model, dtype=torch.float32):
    batch = make_batch(rows=4)
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=dtype != torch.float32):
        logits = model(input_ids=batch.input_ids, use_cache=False).logits
    loss = (logits.float().log_softmax(-1)[..., 3] * torch.linspace(0, 1, logits.shape[1])).sum()
    loss.backward()
    return {"loss": loss.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


@pytest.mark.parametrize("kind", list(MODELS))
def test_a_model_gives_the_same_loss_and_gradients(kind):
    model, generator = make_model(kind), torch.Generator().manual_seed(0)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.1)  # gains of one would hide that they are forgotten
    expected, found = loss_and_gradients(model), loss_and_gradients(shortened(model))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name] - value).abs().max() <= 1e-5 * value.abs().max(), name


@pytest.mark.parametrize("kind", list(MODELS))
def test_under_autocast_the_gradients_are_as_near_to_those_of_float32(kind):
    model = make_model(kind)
    exact = loss_and_gradients(copy.deepcopy(model))
    before, after = (loss_and_gradients(one, torch.bfloat16) for one in (copy.deepcopy(model), shortened(model)))

    def distance(found):
        return sum(float((found[name] - value).square().sum()) for name, value in exact.items()) ** 0.5

    assert distance(after) <= 1.2 * distance(before)


def test_the_norm_is_one_node_of_the_graph_and_has_its_gradient():
    norm = Qwen3RMSNorm(16, eps=1e-5)
    model = nn.ModuleDict({"norm": norm})
    torch.manual_seed(0)
    x = torch.randn(2, 3, 16).transpose(0, 1).requires_grad_()
    weight = torch.randn(3, 2, 16)
    with torch.no_grad():
        norm.weight.normal_()
    expected = torch.autograd.grad((norm(x) * weight).sum(), (x, norm.weight))
    shorten(model)
    assert "RmsNorm" in type(norm(x).grad_fn).__name__
    for one, other in zip(expected, torch.autograd.grad((norm(x) * weight).sum(), (x, norm.weight)), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-5, atol=1e-5)
    norm.weight.requires_grad_(False)
    (alone,) = torch.autograd.grad((norm(x) * weight).sum(), x)
    torch.testing.assert_close(alone, expected[0], rtol=1e-5, atol=1e-5)


class Reader(nn.Module):
    """Two linear layers that read one tensor, which may change in between."""

    def __init__(self, change=lambda x: None):
        super().__init__()
        self.one, self.two, self.change, self.read = nn.Linear(4, 4), nn.Linear(4, 4), change, []
        for layer in (self.one, self.two):
            layer.register_forward_pre_hook(lambda _, inputs: self.read.append(inputs[0]))

    def forward(self, x):
        first = self.one(x)
        self.change(x)
        return first + self.two(x)


def read_twice(reader, x):
    shorten(reader)
    for layer in (reader.one, reader.two):
        layer._forward_pre_hooks.move_to_end(next(iter(layer._forward_pre_hooks)))  # watch what the layer gets
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return reader(x), *reader.read


def test_what_two_layers_read_is_cast_once():
    x = torch.randn(3, 4, requires_grad=True)
    out, one, two = read_twice(reader := Reader(), x * 1)
    assert one is two
    assert one.dtype == torch.bfloat16
    out.sum().backward()
    expected = reader.one.weight.sum(0) + reader.two.weight.sum(0)
    torch.testing.assert_close(x.grad, expected.expand(3, 4), rtol=0.02, atol=0.02)


def test_what_has_changed_is_cast_again():
    _, one, two = read_twice(Reader(lambda x: x.add_(1)), torch.randn(3, 4, requires_grad=True) * 1)
    torch.testing.assert_close(two, one + 1, rtol=0.02, atol=0.02)


needs_glibc = pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc", reason="mallopt exists only in glibc, the C library of most Linux systems"
)
MEASURED = """
import ctypes, resource, sys
from retrain.training.cpu_kernels import keep_freed_memory

if sys.argv[1] == "keep":
    keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

SIZES = 3, 20, 20, 20, 5

def use():
    blocks = [library.malloc(ctypes.c_size_t(size << 20)) for size in SIZES]
    for block, size in zip(blocks, SIZES):
        ctypes.memset(block, 1, size << 20)
    for block in blocks:
        library.free(block)

use()
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    use()
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.slow
@needs_glibc
def test_memory_that_was_freed_is_used_again_without_the_systems_help():
    cleared = {
        how: int(
            subprocess.run([sys.executable, "-c", MEASURED, how], capture_output=True, text=True, check=True).stdout
        )
        for how in ("keep", "return")
    }
    assert cleared["keep"] < 100 < 5 * 60 * 256 <= cleared["return"]  # pages of 4 KiB


def test_collections_skip_what_was_there_before_and_nothing_stays_frozen(monkeypatch):
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)  # the session's own objects are frozen
    with unscanned_heap():
        assert not any(one is shorten for one in gc.get_objects())
        made: list = []
        made.append(made)
        assert any(one is made for one in gc.get_objects())
    assert any(one is shorten for one in gc.get_objects())
