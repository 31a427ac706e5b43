"""Lines at the start of a run about what its model does unexpectedly."""

import json

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from retrain.functional import devices
from retrain.system.model_paths import rope_length
from tests.make_checkpoint import CHAT_TEMPLATE, make_checkpoint

DATED = (
    "{% if not date_string is defined %}{% set date_string = strftime_now('%d %b %Y') %}{% endif %}{{ date_string }}"
)


@pytest.fixture
def warnings(train, tmp_path):
    """Runs of no steps with a small model, as a function of (template, settings)."""

    def run(template, *options):
        messages = []
        folder = make_checkpoint(tmp_path / "model", chat=True)
        (folder / "chat_template.jinja").write_text(template)
        (tmp_path / "rows.jsonl").write_text(json.dumps({"prompt": "1+2?", "answer": "3"}) + "\n")
        settings = (f"model.path={folder}", "task.name=jsonl", f"jsonl.path={tmp_path / 'rows.jsonl'}")
        settings += ("jsonl.heldout_fraction=0", "training.max_steps=0", "warmup.steps=0", "eval.problems=0", *options)
        train(*settings, observe=lambda event, found: messages.append(found.get("text")) if event == "message" else 0)
        return [text for text in messages if text]

    return run


def test_a_template_with_the_days_date_is_named(warnings):
    assert any("writes today's date into prompts" in text for text in warnings(DATED + CHAT_TEMPLATE))


def test_a_date_that_is_fixed_or_a_template_without_one_is_not(warnings):
    fixed = 'model.chat_params={date_string="26 Jul 2024"}'
    assert not any("date" in text for text in warnings(DATED + CHAT_TEMPLATE, fixed))


@pytest.mark.parametrize(("fast", "said"), [(torch.float32, True), (torch.bfloat16, False)])
def test_bfloat16_on_a_processor_without_its_instructions_is_named(warnings, monkeypatch, fast, said):
    monkeypatch.setattr("retrain.run.build.matmul_dtype", lambda device: fast)
    found = warnings(CHAT_TEMPLATE, "model.dtype=bfloat16")
    assert any("float32 is several times faster; set [model] dtype" in text for text in found) == said
    assert devices.matmul_dtype(torch.device("cuda")) == torch.bfloat16


@pytest.mark.parametrize(
    ("rope", "length"),
    [
        ({"rope_type": "default"}, float("inf")),
        ({"rope_type": "dynamic", "factor": 2.0}, 32),
        ({"rope_type": "longrope", "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}, 32),
    ],
)
def test_frequencies_that_depend_on_the_longest_row_have_a_length(rope, length):
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=64, original_max_position_embeddings=32, rope_parameters={"rope_theta": 1e4, **rope},  # pyright: ignore[reportCallIssue]
    )  # fmt: skip
    assert rope_length(LlamaForCausalLM(config)) == length
