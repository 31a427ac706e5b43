"""Checkpoint directories of other architectures train through the same TOML as the built-in model."""

import json
import os

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Gemma3Config, GPTNeoXConfig, MambaConfig, MistralConfig

from retrain.storage import checkpoint
from retrain.training.model.loading import load_model
from tests.make_checkpoint import make_checkpoint, make_tokenizer

TOML = """
model = {{ path = "base", dtype = "float32" }}
training = {{ max_steps = 3, batch_size = 4, group_size = 4, max_tokens = 10 }}
optimizer = {{ lr = 3e-3 }}
warmup = {{ steps = {warmup}, problems = 64 }}
eval = {{ every = 0, problems = 4 }}
checkpoint = {{ every = 1, keep = 3 }}
rollout = {{ parity_every = 1 }}
reward_pool = {{ workers = 0 }}
[[rewards]]
name = "format"  # a model of random weights earns it half of the time
params = {{ pattern = "[a-mA-M]" }}
[[rewards]]
name = "exact"
weight = 0
"""


@pytest.fixture
def train(folder, cli):
    """Train `folder/base`: `train(*overrides, warmup=0)` -> run directory and what was printed."""

    def go(*overrides, warmup=0):
        (folder / "run.toml").write_text(TOML.format(warmup=warmup))
        result = cli("train", "run.toml", "--plain", *(part for key in overrides for part in ("--set", key)), code=0)
        return folder / "runs" / "run", result.output

    return go


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def tensors(folder):
    return load_model(str(folder)).model.state_dict()


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(("family", "decoder"), [("llama", "fused"), ("gpt2", "general")])
@pytest.mark.parametrize(("chat", "warmup"), [(False, 0), (True, 3)])
def test_a_checkpoint_directory_is_trained_and_saved(folder, train, family, decoder, chat, warmup):
    make_checkpoint(folder / "base", family, chat=chat, pad=not chat)
    run, printed = train(warmup=warmup)
    assert f"torch engine, {decoder} decoder" in printed
    rows = metrics(run)
    assert all(row["policy/clip_fraction"] == 0 for row in rows if not row["update/skipped"])
    assert len({row["reward/mean"] for row in rows}) > 1
    assert any(row.get("grad/norm", 0) > 0 for row in rows)

    saved, base = tensors(run / "model"), tensors(folder / "base")
    assert any(not torch.equal(saved[name], base[name]) for name in base)
    trained = checkpoint.load(run / "checkpoints" / "step-000003")["policy"]["model"]
    assert all(torch.equal(saved[name], value) for name, value in trained.items())
    AutoTokenizer.from_pretrained(run / "model")
    assert AutoModelForCausalLM.from_pretrained(run / "model").config.model_type == family


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "why"),
    [
        (dict(cls=MambaConfig, state_size=8), "recurrent state"),
        (dict(cls=MistralConfig, num_attention_heads=4, num_key_value_heads=2, sliding_window=8), "slides over 8"),
        (dict(cls=Gemma3Config), "multimodal"),
    ],
)
def test_what_the_embedded_engine_cannot_serve_is_sampled_by_transformers(folder, train, cli, config, why):
    cls = config.pop("cls")
    small = dict(vocab_size=288, hidden_size=32, num_hidden_layers=1, intermediate_size=64,
                 bos_token_id=None, eos_token_id=1, pad_token_id=0)  # fmt: skip
    if cls is Gemma3Config:  # the numbers stand apart for text and for images
        heads = dict(num_attention_heads=2, num_key_value_heads=2, head_dim=16)
        sight = dict(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=1, image_size=28)
        small = dict(text_config=small | heads, vision_config=sight | {"patch_size": 14}, eos_token_id=1)
    model = AutoModelForCausalLM.from_config(cls(**small, **config))
    model.save_pretrained(folder / "base")
    make_tokenizer().save_pretrained(folder / "base")
    run, printed = train()
    assert "transformers engine, generate of" in printed
    assert max(row.get("mismatch/logp_diff_max", 0) for row in metrics(run)) < 1e-4
    explained = json.loads(cli("explain", "run.toml", "--json").stdout)
    assert explained["engine"]["name"] == "transformers"
    assert why in explained["engine"]["why"]
    assert explained["pipeline"]["correction_in_the_update"] == "tis"


def test_generation_settings_that_contradict_each_other_do_not_cost_the_model(folder, train):
    make_checkpoint(folder / "base")
    settings = {"temperature": 0.9, "top_p": 0.6, "do_sample": False, "eos_token_id": [1, 2]}
    (folder / "base" / "generation_config.json").write_text(json.dumps(settings))
    run, _ = train()
    assert load_model(str(run / "model")).stop_ids == (1, 2)


def test_a_pad_token_without_an_embedding_is_never_embedded(folder, train):
    shape = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2)
    config = MistralConfig(vocab_size=288, sliding_window=8, eos_token_id=1, num_key_value_heads=2, **shape)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    tokenizer = make_tokenizer()
    tokenizer.add_special_tokens({"pad_token": "[PAD]"})
    assert tokenizer.pad_token_id == 288
    tokenizer.save_pretrained(folder / "base")
    assert any(row.get("grad/norm", 0) > 0 for row in metrics(train()[0]))


LORA = ("model.lora.r=2", 'loss=[{name="ppo_clip"},{name="kl",weight=0.1}]', "optimizer.lr=0.03")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "warmup"), [("llama", 0), ("neox", 3)])
def test_adapters_train_end_to_end(folder, train, cli, family, warmup):
    import peft

    if family == "llama":
        make_checkpoint(folder / "base")
    else:
        config = GPTNeoXConfig(vocab_size=288, hidden_size=32, num_hidden_layers=1, num_attention_heads=2,
                               intermediate_size=64, eos_token_id=1)  # fmt: skip
        AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
        make_tokenizer().save_pretrained(folder / "base")
    run, _ = train(*LORA, warmup=warmup)
    rows = [row for row in metrics(run) if not row["update/skipped"]]
    assert rows[0]["loss/kl"] == pytest.approx(0, abs=1e-6)
    assert rows[-1]["loss/kl"] > 1e-4

    # The adapter fits the model that it names: the run's own base where a warm start came first.
    named = json.loads((run / "model" / "adapter" / "adapter_config.json").read_text())["base_model_name_or_path"]
    assert named == ("../base" if warmup else str(folder / "base"))
    ids = torch.arange(20)[None] * 7
    expected = AutoModelForCausalLM.from_pretrained(run / "model")(ids).logits
    base = AutoModelForCausalLM.from_pretrained(run / "model" / "adapter" / named)
    assert (base(ids).logits - expected).abs().max() > 0.01
    adapted = peft.PeftModel.from_pretrained(base, run / "model" / "adapter")
    torch.testing.assert_close(adapted(ids).logits, expected, rtol=1e-4, atol=1e-4)

    for source in ("runs/run", "runs/run/checkpoints/step-000003"):
        assert cli("export", source, "out").exit_code == 0
        files = {os.path.relpath(file, run / "model") for file in (run / "model").rglob("*.safetensors")}
        assert {os.path.relpath(file, folder / "out") for file in (folder / "out").rglob("*.safetensors")} == files
        assert all((folder / "out" / file).read_bytes() == (run / "model" / file).read_bytes() for file in files)
    assert cli("eval", "runs/run").exit_code == 0

    # An export in half the size is rounded once, from the exact sums.
    assert cli("export", "runs/run", "half", "--dtype", "bfloat16").exit_code == 0
    assert json.loads((folder / "half" / "config.json").read_text())["dtype"] == "bfloat16"
    half, whole = (load_file(path / "model.safetensors") for path in (folder / "half", run / "model"))
    assert {value.dtype for value in whole.values()} == {torch.float32}
    assert all(torch.equal(half[name], value.bfloat16()) for name, value in whole.items())


@pytest.mark.slow
@pytest.mark.parametrize("warmup", [0, 3])
def test_a_run_that_was_moved_is_read_as_before(folder, train, cli, warmup, monkeypatch):
    make_checkpoint(folder / "base")
    run, _ = train(*LORA, warmup=warmup)
    ids = torch.arange(20)[None] * 7
    expected = AutoModelForCausalLM.from_pretrained(run / "model")(ids).logits
    before = cli("eval", "runs/run", "--json").stdout

    moved = folder / "elsewhere" / "moved"
    moved.parent.mkdir()
    run.rename(moved)
    assert cli("eval", str(moved), "--json").stdout == before
    assert cli("export", str(moved), "out").exit_code == 0
    monkeypatch.chdir(moved)
    for adapter in (moved / "model" / "adapter", folder / "out" / "adapter"):
        card = (adapter / "README.md").read_text()
        assert "Model Card for Model ID" not in card
        code = card.split("```python\n")[1].split("```")[0].replace("path/to/this/directory", str(adapter))
        found = {}
        exec(code, found)
        torch.testing.assert_close(found["model"](ids).logits, expected, rtol=1e-4, atol=1e-4)

    # Without its base only the merged model is left.
    monkeypatch.chdir(folder)
    gone = moved / "model" / "base" if warmup else folder / "base"
    gone.rename(folder / "gone")
    alone = json.loads(cli("eval", str(moved), "--json", "--trust").stdout)
    assert alone["accuracy"] == json.loads(before)["accuracy"]


def test_adapters_on_one_side_of_a_tie_are_refused(folder, cli):
    make_checkpoint(folder / "base", "gpt2")
    (folder / "run.toml").write_text(TOML.format(warmup=0))
    result = cli("train", "run.toml", "--plain", "--set", 'model.lora.target_modules=["lm_head"]', code=2)
    assert "one matrix for both" in result.output
