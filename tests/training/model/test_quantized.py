"""A base of 4 bits: its values, its products, and that nothing but linear layers has them."""

from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from retrain.errors import ComponentError
from retrain.training.model.builtin_model import build_tokenizer
from retrain.training.model.loading import Loaded, load_model
from retrain.training.model.quantized import FourBits, quantize
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.model.test_forward import own_logprobs
from tests.training.small_models import make_batch, make_model, make_objective

pytestmark = pytest.mark.numeric

CPU = torch.device("cpu")
NF4 = torch.tensor(
    [-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
     -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
     0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0]
)  # fmt: skip
"""The values of appendix E of the paper."""


def nearest(matrix):
    """Every weight's nearest multiple of the largest magnitude of its block of 64."""
    blocks = matrix.double().flatten().split(64)
    scaled = [(block.abs().max(), block) for block in blocks]
    found = [
        most * NF4.double()[(block[:, None] / most - NF4).abs().argmin(-1)] if most else block for most, block in scaled
    ]
    return torch.cat(found).view_as(matrix)


def made(kind="llama", dtype=torch.float32):
    return quantize(Loaded(make_model(kind).to(dtype), None, (0,), kind), CPU)


def policy(kind="llama", dtype="float32", **changes):
    settings = PolicySettings(lr=1e-2, dtype=dtype, quantization="nf4", lora=LoraSettings(r=4, alpha=8), **changes)
    return TorchPolicy(made(kind, getattr(torch, dtype)).model, settings)


@pytest.mark.parametrize("shape", [(32, 48), (7, 9)], ids=["whole blocks", "part of a block"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_weight_is_the_nearest_of_sixteen_and_stays_it(shape, dtype):
    layer = nn.Linear(*shape, bias=False, dtype=dtype)
    layer.weight.data.view(-1)[:70] = 0  # a block of zeros, which has no scale
    first = FourBits(layer, CPU)
    assert first.weight.nbytes == -(-layer.weight.numel() // 64) * 32
    torch.testing.assert_close(
        first.matrix(), nearest(layer.weight).to(dtype), rtol=1e-6 if dtype == torch.float32 else 0, atol=0
    )
    layer.weight.data = first.matrix()
    assert torch.equal(FourBits(layer, CPU).matrix(), first.matrix())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_product_and_gradient_are_those_of_the_dequantized_matrix(dtype):
    plain = nn.Linear(48, 32, dtype=dtype)
    four = FourBits(plain, CPU)
    plain.weight.data = four.matrix()
    inputs, found = (
        [torch.randn(5, 48, generator=torch.Generator().manual_seed(1), requires_grad=True) for _ in "ab"],
        [],
    )
    for x, layer in zip(inputs, (plain, four), strict=True):
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            found.append(layer(x))
        found[-1].float().square().sum().backward()
    slack = 1e-6 if dtype == torch.float32 else 1e-2
    torch.testing.assert_close(found[1], found[0], rtol=slack, atol=slack)
    torch.testing.assert_close(
        inputs[1].grad, inputs[0].grad, rtol=slack, atol=slack * float(inputs[0].grad.abs().max())
    )


@pytest.mark.parametrize("kind", ["llama", "qwen3", "neox"])
def test_all_linear_layers_but_the_head_have_four_bits(kind):
    model, before = made(kind).model, dict(make_model(kind).named_parameters())
    four = {f"{name}.weight" for name, layer in model.named_modules() if isinstance(layer, FourBits)}
    assert four == {name for name, p in before.items() if p.ndim == 2 and "embed" not in name and "head" not in name}
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters() if name not in four)
    assert not any(p.requires_grad for p in model.parameters())


def test_a_model_without_linear_layers_is_refused():
    with pytest.raises(ComponentError, match="gpt2 has no linear layers"):
        made("gpt2")


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
@pytest.mark.parametrize("checkpointing", [False, True])
def test_what_is_trained_is_the_dequantized_base_and_the_update(kind, checkpointing):
    trained, batch = policy(kind, gradient_checkpointing=checkpointing), make_batch()
    plain = make_model(kind)
    plain.load_state_dict(dict(trained.reference_weights()))
    other = TorchPolicy(plain, PolicySettings(lr=1e-2, lora=LoraSettings(r=4, alpha=8)))
    for _ in range(2):
        found, expected = (one.update(batch, make_objective()) for one in (trained, other))
    assert found["grad/norm"] == pytest.approx(expected["grad/norm"], rel=1e-4)
    assert trained.state_dict()["model"].keys() == other.state_dict()["model"].keys(), "the adapters alone"
    merged = make_model(kind)
    merged.load_state_dict(dict(trained.weights()))
    torch.testing.assert_close(
        own_logprobs(merged, batch), trained.logprobs(batch)["old_logprobs"], rtol=1e-4, atol=1e-4
    )
    assert (trained.reference()(batch) - trained.logprobs(batch)["old_logprobs"]).abs().max() > 1e-3


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_an_empty_model_is_read_and_quantized_matrix_by_matrix(tmp_path, kind):
    """qwen3's head is its embedding."""
    whole = make_model(kind)
    whole.save_pretrained(tmp_path)
    build_tokenizer(["1+1=", "2"]).save_pretrained(tmp_path)
    loaded, given, most = load_model(str(tmp_path), empty=True), [], 0
    assert loaded.source is not None
    read = loaded.source

    def watched(name):
        nonlocal most
        value = read(name)
        most = max(most, sum(not one.expired() for one in given))
        if "proj" in name:
            given.append(StorageWeakRef(value.untyped_storage()))
        return value

    empty = quantize(replace(loaded, source=watched), CPU)
    assert (most, len(given)) == (0, 14), "each matrix has gone when the next one is read"
    assert empty.source is None
    expected = made(kind).model.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in empty.model.state_dict().items())
    assert empty.model.get_output_embeddings().weight.is_meta is False
