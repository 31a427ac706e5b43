"""TRL itself, on the CPU: a random model, real sampling, real updates."""

import pytest
import torch

from retrain.adapters import compute_advantage
from retrain.adapters.trl import AdvantageMixin, grpo_trainer
from retrain.errors import ComponentError

pytestmark = pytest.mark.numeric

trl = pytest.importorskip("trl", reason="`make test` does not install it: `make bench` does")

PROMPTS = [{"prompt": f"{a}+{b}=", "answer": str(a + b)} for a in range(4) for b in range(4)]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A random Qwen3 of two small layers and a tokenizer of characters, as directories that TRL loads."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

    folder = tmp_path_factory.mktemp("model")
    vocabulary = {text: number for number, text in enumerate(["<pad>", "<eos>", *"0123456789+= so"])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", padding_side="left"
    )
    fast.save_pretrained(folder)
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=len(vocabulary),
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        pad_token_id=0,
        eos_token_id=1,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    return folder


def parity(completion_ids, **_):
    """Right or wrong as good as by chance, whatever the length."""
    return [float(sum(ids) % 2 == 0) for ids in completion_ids]


def digits(completions, **_):
    return [0.1 * sum(c.isdigit() for c in completion) for completion in completions]


def recording(base):
    """The trainer's class, noting for each batch what was scored, how long it was, and TRL's final advantages."""

    class Recording(base):
        def _generate_and_score_completions(self, inputs):
            self.seen = getattr(self, "seen", [])
            batch = super()._generate_and_score_completions(inputs)
            self.seen.append((batch, [len(ids) for ids in self.ids], self.scored))
            return batch

        def _calculate_rewards(self, inputs, prompts, completions, completion_ids_list):
            self.ids = completion_ids_list
            self.scored = super()._calculate_rewards(inputs, prompts, completions, completion_ids_list)
            return self.scored

    return Recording


def train(base, model, folder, rewards=(parity,), **more):
    from datasets import Dataset
    from transformers import AutoTokenizer

    settings = {
        "max_steps": 2,
        "per_device_train_batch_size": 16,
        "num_generations": 4,
        "max_completion_length": 12,
        "temperature": 1.0,
        "beta": 0.0,
        "learning_rate": 1e-2,
        "use_cpu": True,
        "bf16": False,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "logging_steps": 1,
        "gradient_checkpointing": False,
        "seed": 3,
    }
    trainer = recording(base)(
        model=str(model),
        reward_funcs=list(rewards),
        args=trl.GRPOConfig(output_dir=str(folder), **settings | more),
        train_dataset=Dataset.from_list(PROMPTS),
        processing_class=AutoTokenizer.from_pretrained(str(model), padding_side="left"),
    )
    trainer.train()
    return trainer


@pytest.mark.parametrize(
    ("mode", "params"), [("grpo", {}), ("maxrl", {}), ("dca", {"beta": 0.4}), ("grpo_lp", {"gamma": 0.01})]
)
def test_trl_trains_on_the_advantages_of_retrain(mode, params, model, tmp_path):
    trainer = train(grpo_trainer(mode, **params), model, tmp_path)
    assert len(trainer.seen) == 2
    for batch, lengths, scored in trainer.seen:
        assert 0 < scored.mean() < 1
        assert len(set(lengths)) > 2
        groups = [i // 4 for i in range(16)]
        expected = compute_advantage(scored[:, 0], lengths, groups, mode, max_tokens=12, **params)
        assert expected.abs().sum() > 0
        assert torch.equal(batch["advantages"], expected)
    last = [row for row in trainer.state.log_history if "grad_norm" in row][-1]
    assert last["grad_norm"] > 0
    logged = list(trainer._logs["advantages"])
    assert logged == trainer.seen[-1][0]["advantages"].tolist()


def test_trl_without_the_adapter_agrees_on_grpo(model, tmp_path):
    """An independent check: TRL's own mean-centered advantages, of the same seed, are those of `grpo`."""
    own = train(trl.GRPOTrainer, model, tmp_path, scale_rewards="none")
    ours = train(grpo_trainer("grpo"), model, tmp_path, scale_rewards="group")
    for (left, lengths, _), (right, same, _) in zip(own.seen, ours.seen, strict=True):
        assert lengths == same
        assert torch.allclose(left["advantages"], right["advantages"], atol=1e-7)


def test_trl_without_the_adapter_agrees_on_grpo_std_at_its_own_constants(model, tmp_path):
    own = train(trl.GRPOTrainer, model, tmp_path, scale_rewards="group")
    ours = train(grpo_trainer("grpo_std", ddof=1, eps=1e-4), model, tmp_path)
    assert torch.allclose(own.seen[0][0]["advantages"], ours.seen[0][0]["advantages"], atol=1e-6)


def test_several_rewards_are_weighted_and_the_first_opinion_says_what_is_correct(model, tmp_path):
    def sometimes(completions, **_):
        return [None if len(completion) % 3 == 0 else 1.0 for completion in completions]

    trainer = train(grpo_trainer("dca"), model, tmp_path, (sometimes, digits), reward_weights=[1.0, 0.5], max_steps=1)
    batch, lengths, scored = trainer.seen[0]
    rewards = (scored * torch.tensor([1.0, 0.5])).nansum(1)
    correct = scored[:, 0].where(~scored[:, 0].isnan(), scored[:, 1]) > 0.5
    expected = compute_advantage(rewards, lengths, [i // 4 for i in range(16)], correct=correct, max_tokens=12)
    assert scored[:, 0].isnan().any()
    assert torch.equal(batch["advantages"], expected)


def test_completions_that_nothing_scored_take_no_part(model, tmp_path):
    def picky(completions, **_):
        return [None if i % 4 == 0 else float(i % 2) for i in range(len(completions))]

    trainer = train(grpo_trainer("grpo"), model, tmp_path, (picky,), max_steps=1)
    assert trainer.seen[0][0]["advantages"].tolist() == pytest.approx([0, 1 / 3, -2 / 3, 1 / 3] * 4)


def test_evaluation_uses_its_own_group_size(model, tmp_path):
    from datasets import Dataset

    trainer = train(grpo_trainer("grpo"), model, tmp_path, max_steps=1, num_generations_eval=2)
    trainer.evaluate(Dataset.from_list(PROMPTS[:8]))
    batch, _, scored = trainer.seen[-1]
    pairs = scored[:, 0].view(-1, 2)
    assert torch.equal(batch["advantages"].view(-1, 2), pairs - pairs.mean(1, keepdim=True))


def test_a_mistake_is_found_before_anything_loads():
    with pytest.raises(ComponentError, match='did you mean "dca"'):
        grpo_trainer("dcca")
    with pytest.raises(ComponentError, match="it takes beta, dynamic"):
        grpo_trainer("dca", gamma=1.0)


def test_the_mixin_goes_before_any_subclass():
    class Own(AdvantageMixin, trl.GRPOTrainer):
        retrain_mode = "maxrl"

    assert issubclass(Own, trl.GRPOTrainer)
    assert grpo_trainer("maxrl").__mro__[1] is AdvantageMixin
