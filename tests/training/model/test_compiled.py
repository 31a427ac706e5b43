"""Decoder layers that are compiled: one graph for all of them, and the same results. The code generator is left out."""

import logging

import pytest
import torch

from retrain.functional import fused_scores
from retrain.training.model.compiled import compile_layers
from retrain.training.model.forward import Forward
from retrain.training.policy import TorchPolicy
from retrain.training.settings import LoraSettings, PolicySettings
from tests.training.small_models import make_batch, make_model, make_objective, values_and_gradients

pytestmark = pytest.mark.numeric
compile_module = torch.nn.Module.compile


def attend(query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale=None, window_size, enable_gqa=False):
    """As varlen_attn, by one product of all queries and all keys, which can be traced."""
    key, value = (x.repeat_interleave(query.shape[1] // x.shape[1], 1) for x in (key, value))
    queries, keys = torch.arange(query.shape[0]), torch.arange(key.shape[0])
    row, other = torch.bucketize(queries, cu_seq_q[1:], right=True), torch.bucketize(keys, cu_seq_k[1:], right=True)
    place = queries - cu_seq_q[1:][row] + cu_seq_k[1:][row]  # aligned at the end
    visible = (row[:, None] == other) & (keys <= place[:, None])
    scores = torch.einsum("qhd,khd->hqk", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(~visible, -torch.inf).softmax(-1), value)


@pytest.fixture
def graphs(monkeypatch):
    """Count the graphs of layers, which must not break, and run them as they are."""
    found = []

    def backend(graph, inputs):
        found.append(graph)
        return graph

    def traced(self, *args, disable=False, **options):
        compile_module(self, *args, disable=disable, backend=backend, fullgraph=True, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    monkeypatch.setattr(fused_scores, "_compiled", lambda function: function)
    monkeypatch.setattr(fused_scores, "_compiles", set())
    torch.compiler.reset()
    yield found
    torch.compiler.reset()


@pytest.mark.slow
@pytest.mark.parametrize("ragged", [False, True])
def test_all_layers_share_a_graph_and_batches_of_other_sizes_need_no_other(ragged, graphs, monkeypatch):
    monkeypatch.setattr("retrain.training.model.ragged.varlen_attn", attend)
    monkeypatch.setattr("retrain.training.model.forward.shorten", lambda model: None)  # norms for CPUs
    model, batches = make_model(), [make_batch(seed=seed) for seed in (0, 1)]
    forward = Forward(model, PolicySettings(dtype="bfloat16"))
    forward.ragged = ragged
    expected = [values_and_gradients(forward, model, batch) for batch in batches]
    forward.compiled = compile_layers(forward.model, forward._trial)
    assert forward.compiled
    assert len(graphs) == 1
    for batch, values in zip(batches, expected, strict=True):
        for one, other in zip(values_and_gradients(forward, model, batch), values, strict=True):
            torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert len(graphs) == 1


# One graph with and one without gradient. With LoRA the first layer's input has no gradient, and the reference is
# computed without adapters; with checkpointing transformers gives that input a gradient, also where nothing is trained.
@pytest.mark.slow
@pytest.mark.parametrize(("checkpointing", "lora", "count"), [(False, None, 2), (True, LoraSettings(r=4), 5)])
def test_updates_scores_and_the_reference_share_few_graphs(checkpointing, lora, count, graphs, monkeypatch):
    monkeypatch.setattr("retrain.training.model.forward.shorten", lambda model: None)
    settings = PolicySettings(lr=1e-3, dtype="bfloat16", gradient_checkpointing=checkpointing, lora=lora)
    batch, seen = make_batch(), []
    for compile in (False, True):
        policy = TorchPolicy(make_model(), settings)
        if compile:
            assert compile_layers(policy.model, policy.forward._trial)
            policy.forward.compiled = True
        score = policy.reference()  # without adapters, or a copy of the model, which is not compiled here
        metrics = [policy.update(batch, make_objective("ppo_clip")) for _ in range(3)]
        tables = [policy.logprobs(batch)["old_logprobs"], score(batch), policy.logprobs(batch)["old_logprobs"]]
        seen.append([torch.tensor([row["grad/norm"] for row in metrics]), *tables])
    for one, other in zip(*seen, strict=True):
        torch.testing.assert_close(one, other, rtol=0.05, atol=0.05)
    assert len(graphs) == count


@pytest.mark.slow
def test_a_compiler_that_fails_leaves_the_layers_as_they_were(monkeypatch, caplog):
    def broken(graph, inputs):
        raise RuntimeError("no Triton")

    def traced(self, *args, disable=False, **options):
        compile_module(self, *args, disable=disable, backend=broken, **options)

    monkeypatch.setattr(torch.nn.Module, "compile", traced)
    model, batch = make_model(), make_batch()
    forward = Forward(model, PolicySettings())
    expected = values_and_gradients(forward, model, batch)
    with caplog.at_level(logging.WARNING):
        assert not compile_layers(forward.model, forward._trial)
    [message] = caplog.messages
    assert message.startswith("updates are slower, because torch.compile failed: ")
    assert "no Triton" in message
    for one, other in zip(values_and_gradients(forward, model, batch), expected, strict=True):
        assert torch.equal(one, other)


def test_layers_that_compute_something_else_are_not_used(graphs, monkeypatch, caplog):
    monkeypatch.setattr("retrain.training.model.forward.shorten", lambda model: None)
    forward = Forward(make_model(), PolicySettings())
    results = iter([torch.ones(9, 4) + torch.eye(9, 4), torch.ones(9, 4)])
    with caplog.at_level(logging.WARNING):
        assert not compile_layers(forward.model, lambda *batch: next(results))
    assert "standard deviations" in caplog.text


def test_on_a_cpu_nothing_is_compiled():
    assert not Forward(make_model(), PolicySettings(compile=True)).compiled
