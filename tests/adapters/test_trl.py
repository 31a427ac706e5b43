"""TRL itself, on the CPU: a random model, real sampling, real updates."""

import pytest
import torch

from retrain.adapters import compute_advantage
from retrain.adapters.trl import AdvantageMixin, grpo_trainer
from retrain.errors import ComponentError, ConfigError

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


GRAMS = [*"so123456789"]
"""Words of one character, which a random model of characters writes often enough."""
TABLES = {"gtpo": {"beta": 0.5}, "planning": {"strategic_grams": GRAMS}}
CHAINS = {
    "gtpo": (["gtpo"], {}),
    "gtpo_hicra": (["gtpo", "hicra"], {"hicra": {"alpha": 0.4}}),
    "gtpo_sepa": (["sepa", "gtpo"], {"sepa": {"steps": 2, "delay_steps": 0, "ramp_from": "start"}}),
}


def watching(base):
    """The trainer's class, noting what reaches the loss."""

    class Watching(base):
        def _compute_loss(self, model, inputs):
            self.reached = [*getattr(self, "reached", []), inputs["advantages"].clone()]
            return super()._compute_loss(model, inputs)

        def _generate_and_score_completions(self, inputs):
            self.logits = [*getattr(self, "logits", []), None]
            batch = super()._generate_and_score_completions(inputs)
            ids = torch.cat([batch["prompt_ids"], batch["completion_ids"]], 1)
            mask = torch.cat([batch["prompt_mask"], batch["completion_mask"]], 1)
            with torch.no_grad():
                logits = self.model(input_ids=ids, attention_mask=mask).logits.float()
            self.logits[-1] = logits[:, batch["prompt_ids"].shape[1] - 1 : -1].log_softmax(-1)
            return batch

    return Watching


def by_hand(trainer, index, episode, chain, tables, step):
    """Credit of the registry's functions, one after the other, on log-probs that the test computed."""
    from retrain.registry import bind

    batch, logs = trainer.seen[index][0], trainer.logits[index]
    mask = batch["completion_mask"].bool()
    drawn = logs.gather(-1, batch["completion_ids"][..., None])[..., 0].where(mask, 0.0)
    signal = bind("signal", "planning_mask", tables["planning"]).build(
        {"tokenizer": trainer.processing_class, "search_paths": ()}
    )
    lengths = torch.tensor(trainer.seen[index][1])
    columns = {
        "advantages": episode[:, None] * mask,
        "response_mask": mask,
        "turn_ids": mask.long() * 0,
        "uncertainty": -drawn,
        "entropy": (-logs.exp() * logs).sum(-1).where(mask, 0.0),
        "planning_mask": signal(batch["completion_ids"], mask)[0],
        "lengths": lengths,
        "group_ids": torch.arange(16) // 4,
        "sepa_lambda": min(step / 2, 1.0),
    }
    assert 0 < columns["planning_mask"].float().mean() < 0.9
    for name in chain:
        stage = bind("transform", name, {} if name == "sepa" else tables["hicra" if "hicra" in name else name])
        value = stage(*(columns[read] for read in stage.reads))
        columns["uncertainty" if name == "sepa" else "advantages"] = value[0] if isinstance(value, tuple) else value
    return columns["advantages"]


@pytest.mark.parametrize("transform", CHAINS)
def test_token_transforms_reach_the_loss_of_trl(transform, model, tmp_path):
    chain, more = CHAINS[transform]
    tables = {**TABLES, **more}
    trainer = train(watching(grpo_trainer("maxrl", transform=transform, tables=tables)), model, tmp_path, max_steps=3)
    for index, (batch, lengths, scored) in enumerate(trainer.seen):
        episode = compute_advantage(scored[:, 0], lengths, [i // 4 for i in range(16)], "maxrl", max_tokens=12)
        wanted = by_hand(trainer, index, episode, chain, tables, index)
        assert batch["advantages"].shape == batch["completion_ids"].shape
        torch.testing.assert_close(batch["advantages"], wanted, atol=1e-6, rtol=0)
        reached = [row.tolist() for row in trainer.reached[index]]  # TRL shuffles the rows before the loss
        assert sorted(reached) == [pytest.approx(row, abs=1e-6) for row in sorted(wanted.tolist())]
        assert float((wanted - episode[:, None] * batch["completion_mask"]).abs().max()) > 1e-3
    assert [row for row in trainer.state.log_history if "grad_norm" in row][-1]["grad_norm"] > 0
    if transform == "gtpo_sepa":
        assert [row["sepa/lambda"] for row in trainer.state.log_history if "sepa/lambda" in row] == [0.0, 0.5, 1.0]


def hicra(model, folder, **parameters):
    from retrain.adapters import HICRAConfig, HICRATrainer

    def configured(**settings):
        return HICRAConfig(**settings, **parameters)

    original, trl.GRPOConfig = trl.GRPOConfig, configured
    try:
        return train(watching(HICRATrainer), model, folder)
    finally:
        trl.GRPOConfig = original


def test_hicra_with_the_parameters_of_its_documentation(model, tmp_path):
    trainer = hicra(model, tmp_path, hicra_alpha=0.3, hicra_entropy_topk=0.4, strategic_grams=GRAMS)
    own = train(trl.GRPOTrainer, model, tmp_path)
    tables = {"hicra": {"alpha": 0.3, "entropy_topk": 0.4}, "planning": {"strategic_grams": GRAMS}}
    wanted = by_hand(trainer, 0, own.seen[0][0]["advantages"], ["hicra_entropy"], tables, 0)
    torch.testing.assert_close(trainer.seen[0][0]["advantages"], wanted, atol=1e-6, rtol=0)
    assert float((wanted - own.seen[0][0]["advantages"][:, None] * trainer.seen[0][0]["completion_mask"]).max()) > 0.01
    logged = trainer.state.log_history[0]
    names = ("planning_token_ratio", "planning_advantage_mean", "execution_advantage_mean", "semantic_entropy")
    assert {f"hicra/{name}" for name in names} <= logged.keys()
    assert 0 < logged["hicra/planning_token_ratio"] < 1


def test_planning_tokens_join_those_of_high_entropy(model, tmp_path):
    tables = {"hicra": {"use_planning_tokens": True}, "planning": {"strategic_grams": GRAMS}}
    trainer = hicra(model, tmp_path, use_planning_tokens=True, strategic_grams=GRAMS)
    own = train(trl.GRPOTrainer, model, tmp_path)
    wanted = by_hand(trainer, 0, own.seen[0][0]["advantages"], ["hicra_entropy"], tables, 0)
    torch.testing.assert_close(trainer.seen[0][0]["advantages"], wanted, atol=1e-6, rtol=0)


def test_hicra_switched_off_is_trl(model, tmp_path):
    off, own = hicra(model, tmp_path, use_hicra=False), train(trl.GRPOTrainer, model, tmp_path)
    for (left, *_), (right, *_) in zip(off.seen, own.seen, strict=True):
        assert torch.equal(left["advantages"], right["advantages"])
    assert "hicra/planning_token_ratio" not in off.state.log_history[0]


def test_mistakes_in_tables_are_those_of_a_configuration(model):
    with pytest.raises(ConfigError, match=r"\[gtpo\] bta: unknown key"):
        grpo_trainer("maxrl", transform="gtpo", tables={"gtpo": {"bta": 0.1}})
    with pytest.raises(ConfigError, match=r"\[dca\] beta: nothing in this run reads it"):
        grpo_trainer("maxrl", transform="gtpo", tables={"dca": {"beta": 0.3}})
    with pytest.raises(ConfigError, match=r"HICRAConfig: hicra_alpha: 3 is out of range"):
        hicra(model, "unused", hicra_alpha=3)


def test_what_needs_this_package_s_policy_is_refused(model, tmp_path):
    with pytest.raises(ComponentError, match=r"process_rewards.* needs policy"):
        train(grpo_trainer("rloo", transform="process_rloo"), model, tmp_path)


def test_completions_that_nothing_scored_get_no_token_credit(model, tmp_path):
    def picky(completions, **_):
        return [None if i % 4 == 0 else float(i % 2) for i in range(len(completions))]

    trainer = train(watching(grpo_trainer("grpo", transform="gtpo")), model, tmp_path, (picky,), max_steps=1)
    advantages = trainer.seen[0][0]["advantages"]
    assert advantages[::4].abs().sum() == 0
    assert bool((advantages[1::4].sum(1) > 0).all())


def test_the_tokens_of_tools_split_a_completion_into_turns():
    from retrain.adapters.trl import _turns

    mask = torch.tensor([[True, True, False, True, False], [False, True, True, True, True]])
    ids, rewards = _turns(mask, torch.tensor([1.0, 0.5]))
    assert ids.tolist() == [[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]]
    assert rewards.tolist() == [[0, 0, 0, 1.0, 0], [0, 0, 0, 0, 0.5]]
