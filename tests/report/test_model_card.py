# pyright: reportAttributeAccessIssue=false
"""The model card: front matter that the hub reads, the curve, and a configuration that gives the run again."""

import pytest
import tomli
from huggingface_hub import ModelCard

from retrain.config.load import load
from retrain.config.schema import Config
from retrain.report.model_card import CardFacts, render_adapter_card, render_card, write_card

HOW = {"ci_low": 0.1, "ci_high": 0.9, "problems": 256, "samples": 1, "temperature": 1.0}
ROWS = [{"step": step, "accuracy": step / 200} | HOW for step in range(0, 101, 4)]


def resolved(base="builtin:tiny", task="addition", warmup=0):
    config = Config().model_dump(mode="json")
    config["model"]["path"], config["task"]["name"], config["warmup"]["steps"] = base, task, warmup
    return config


CARD = CardFacts("quick", resolved(warmup=600), evaluations=ROWS, steps=100)


def test_card_of_a_model_made_here(tmp_path):
    text = write_card(tmp_path, CARD).read_text()
    assert (tmp_path / "README.md").exists()
    head = ModelCard(text).data
    assert head.license == "apache-2.0"
    assert head.tags == ["retrain", "reinforcement-learning", "addition"]
    assert head.base_model is None
    assert "600 supervised steps and 100 steps of reinforcement learning on the task `addition`" in text
    assert "~~~toml\n[warmup]\nsteps = 600\n~~~" in text
    assert "builtin:tiny on addition; grpo; 16 prompts x 8 completions" in text


def test_curve_is_a_short_table_with_both_ends():
    lines = [line for line in render_card(CARD).splitlines() if line.endswith("| 0.900 |")]
    assert len(lines) == 12
    assert lines[0] == "| 0 | 0.000 | 0.100 | 0.900 |"
    assert lines[-1] == "| 100 | 0.500 | 0.100 | 0.900 |"
    assert "256 held-out problems, 1 completion(s) each, temperature 1.0" in render_card(CARD)


def test_card_of_a_derived_model_names_its_base():
    text = render_card(CardFacts("r", resolved("org/base: x", "maths"), adapter=True, evaluations=[{"step": 0}]))
    head = ModelCard(text).data
    assert (head.base_model, head.license, head.tags) == ("org/base: x", "other", ["retrain", "maths"])
    assert "not trained further" in text
    assert "The license of `org/base: x` applies" in text
    assert "is in `adapter/`; its base model is `org/base: x`" in text
    assert "| step |\n| --- |\n| 0 |" in text


def test_a_card_shows_how_to_chat_with_a_model_that_was_trained_through_its_template(tmp_path):
    text = render_card(CardFacts("r", resolved(str(tmp_path)), chat=True))
    code = text.split("```python\n")[1].split("```")[0]
    compile(code, "card", "exec")
    assert "tokenizer.apply_chat_template(messages" in code
    assert "max_new_tokens=64" in code
    assert "apply_chat_template" not in render_card(CardFacts("r", resolved()))
    assert ModelCard(text).data.base_model is None, "a directory of this machine"
    assert f"The license of `{tmp_path.name}` applies" in text


@pytest.mark.parametrize(("base", "code"), [("../base", 'adapter / "../base"'), ("org/base", '"org/base"')])
def test_card_of_an_adapter_loads_its_base(base, code):
    text = render_adapter_card(CARD, base)
    head = ModelCard(text).data
    assert (head.library_name, head.base_model) == ("peft", None if base.startswith("..") else base)
    assert f"AutoModelForCausalLM.from_pretrained({code})" in text
    assert "600 supervised steps" in text


def test_missing_values_stay_empty():
    rows = [{"step": 0, "accuracy": 0.5, "greedy_accuracy": 0.75}, {"step": 9, "accuracy": 0.25}]
    assert "| 9 | 0.250 |  |" in render_card(CardFacts("r", resolved(), evaluations=rows))
    assert "evaluation" not in render_card(CardFacts("r", resolved())).lower()


def test_the_configuration_on_the_card_gives_the_run_again(tmp_path):
    source = tmp_path / "source.toml"
    source.write_text(
        '# a comment\n[algorithm]\ntransform_mode = ["gtpo", "hicra"]\n[hicra]\nalpha = 0.3\n[training]\nlr = 1e-5\n'
        '[[rewards]]\nname = "exact"\nweight = 0.5\n[[loss]]\nname = "ppo_clip"\n[[loss]]\nname = "kl"\nweight = 0.1\n'
    )
    loaded = load(source, ["training.max_steps=3"])
    text = render_card(CardFacts("r", loaded.resolved()))
    assert "a comment" not in text
    shown = text.partition("~~~toml\n")[2].partition("~~~")[0]
    assert tomli.loads(shown)["training"] == {"max_steps": 3}
    again = tmp_path / "again.toml"
    again.write_text(shown)
    assert load(again).resolved() == loaded.resolved()
