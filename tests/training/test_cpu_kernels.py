"""A model computes the same values and gradients from fewer operations; freed memory is used again."""

import copy
import gc
import platform
import subprocess
import sys

import pytest
import torch
from torch import nn
from transformers.models.gemma2.modeling_gemma2 import Gemma2RMSNorm
from transformers.models.olmo2.modeling_olmo2 import Olmo2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from retrain.training.cpu_kernels import _is_rms_norm, shorten, unscanned_heap
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


@pytest.mark.parametrize(
    ("kind", "plain"),
    [(Qwen3RMSNorm, True), (Gemma2RMSNorm, False), (Olmo2RMSNorm, False), (nn.RMSNorm, False), (nn.Linear, False)],
)
def test_only_norms_of_the_same_formula_and_type_are_replaced(kind, plain):
    assert _is_rms_norm(kind) == plain  # gemma's gain is 1 + weight, olmo's result has the type of its input


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


def test_what_needs_no_gradient_is_left_to_autocast():
    _, one, two = read_twice(Reader(), torch.randn(3, 4))
    assert one.dtype == two.dtype == torch.float32


def test_a_copy_has_fewer_operations_of_its_own():
    model = shortened(make_model())
    other = copy.deepcopy(model)
    with torch.no_grad():
        other.model.norm.weight.zero_()
    ids = make_batch().input_ids
    assert other(input_ids=ids).logits.abs().max() == 0 < model(input_ids=ids).logits.abs().max()
    hooks = [{hook for m in one.modules() for hook in m._forward_pre_hooks.values()} for one in (model, other)]
    assert len(hooks[0]) == len(hooks[1]) == 1
    assert hooks[0] != hooks[1]
    shorten(other)
    assert all(len(module._forward_pre_hooks) <= 1 for module in other.modules())


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


TRIMMED = """
import ctypes, os
from retrain.training.cpu_kernels import keep_freed_memory, trim_freed_memory

keep_freed_memory()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]

def use(count):  # freed blocks with small ones between them
    blocks = [(library.malloc(ctypes.c_size_t(20 << 20)), library.malloc(ctypes.c_size_t(100))) for _ in range(count)]
    for large, _ in blocks:
        ctypes.memset(large, 1, 20 << 20)
    for large, _ in blocks:
        library.free(large)

def held():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1])

floor = trim_freed_memory(0)
use(40)
before = held()
after = trim_freed_memory(floor)
print(before * os.sysconf("SC_PAGE_SIZE") >> 20, after * os.sysconf("SC_PAGE_SIZE") >> 20)
small = held()
print(trim_freed_memory(small) == small)
"""


@pytest.mark.slow
@needs_glibc
def test_holes_between_small_blocks_go_back_to_the_system():
    out = subprocess.run([sys.executable, "-c", TRIMMED], capture_output=True, text=True, check=True).stdout.split()
    assert int(out[0]) - int(out[1]) > 700  # MB of 800
    assert out[2] == "True"
