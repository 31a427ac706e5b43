"""PRIME as a run: resumed bit for bit, composed with any episode advantage, its model written and taken up again."""

import json

import pytest

from retrain.errors import ComponentError, DivergedError
from retrain.run.export import export
from retrain.run.reopen import reopen
from retrain.run.session import Resume
from tests.run.test_resumed_runs import PRIME
from tests.small_runs import rows

pytestmark = pytest.mark.slow

PLAIN = 'algorithm.transform_mode=["whiten"]'
QUIET = ("eval.problems=0", "checkpoint.every=0", "logging.rollouts_every=0")


def files(folder):
    return {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_the_reward_model_is_scored_and_updated_in_each_epoch_as_the_algorithm_is_printed(train):
    def one_step(*options):
        name = "".join(options).replace("=", "-") or "plain"
        run = train(*PRIME, *QUIET, "training.max_steps=1", *options, name=name)
        prm = run / "model" / "process_rewards"
        steps = json.loads((prm / "prm.json").read_text())["steps"]
        return (
            files(run / "model")["model.safetensors"],
            files(prm)["model.safetensors"],
            steps,
            rows(run / "metrics.jsonl")[0],
        )

    once, each = one_step(), one_step("prime.every=epoch")
    assert (once[:2], once[2], each[2]) == (each[:2], 1, 1), "with one epoch there is no difference"
    once, each = one_step("training.epochs=3"), one_step("training.epochs=3", "prime.every=epoch")
    assert (once[2], each[2]) == (1, 3)
    # In the first step process rewards are 0 until the reward model has learned: the policy's later epochs see them.
    assert once[0] != each[0]
    assert once[3]["prm/loss"] == each[3]["prm/loss"] == pytest.approx(0.6931, abs=1e-4)
    before = one_step("training.epochs=3", "prime.every=epoch", "prime.update=before")
    assert before[2] == 3


def test_until_the_delay_is_over_the_reward_model_learns_and_the_policy_does_not_see_it(train):
    def weights(run):
        return (run / "model" / "model.safetensors").read_bytes()

    plain = train(PLAIN, *PRIME[2:], *QUIET, name="plain")
    late = train(*PRIME, *QUIET, "prime.delay=3", "training.max_steps=3", name="late")
    assert weights(late) == weights(train(PLAIN, *PRIME[2:], *QUIET, "training.max_steps=3", name="three"))
    assert all(step["prm/grad_norm"] > 0 for step in rows(late / "metrics.jsonl"))
    assert weights(train(*PRIME, *QUIET, "prime.delay=3", name="then")) != weights(plain)


def test_it_can_be_saved_loaded_and_taken_up_by_another_run(train, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = train(*PRIME, *QUIET, name="first") / "model" / "process_rewards"
    for place in (folder, folder / "reference"):
        model, tokenizer = AutoModelForCausalLM.from_pretrained(place), AutoTokenizer.from_pretrained(place)
        assert model(**tokenizer("12+34?\n", return_tensors="pt")).logits.isfinite().all()
    taken = train(PRIME[0], PRIME[2], *QUIET, f'prime.path="{folder}"', "prime.update=none", name="second")
    steps = rows(taken / "metrics.jsonl")
    assert steps[0]["prm/reward_mean"] != 0.0
    assert not any("prm/grad_norm" in step for step in steps)
    written = files(taken / "model" / "process_rewards")
    assert written["model.safetensors"] == files(folder)["model.safetensors"]


def test_a_checkpoint_is_exported_with_the_model_of_its_own_step(train, tmp_path):
    run = train(*PRIME, "eval.problems=0")
    exported = {}
    for step in (2, 4):
        trained = reopen(run / "checkpoints" / f"step-{step:06d}", (), lambda event, details: None, "weights")
        export(trained, tmp_path / str(step))
        exported[step] = files(tmp_path / str(step) / "process_rewards")
    final = files(run / "model" / "process_rewards")
    assert exported[4] == final
    assert exported[2]["model.safetensors"] != final["model.safetensors"]
    assert exported[2]["reference/model.safetensors"] == final["reference/model.safetensors"]


def test_a_model_with_another_tokenizer_is_refused(train, tmp_path):
    folder = train(*PRIME, *QUIET, "training.max_steps=1", name="first") / "model" / "process_rewards"
    file = folder / "tokenizer.json"
    file.write_text(file.read_text().replace('"+"', '"§"'))
    with pytest.raises(ComponentError, match="another tokenizer"):
        train(*PRIME, *QUIET, f'prime.path="{folder}"', name="second")


def test_a_run_that_becomes_prime_starts_its_model_anew_and_says_so(train):
    said = []
    train(*PRIME[2:], "eval.problems=0", "training.max_steps=2")
    changes = ["training.max_steps", "algorithm.transform_mode", "components", "prime"]
    resume = Resume("auto", allow_change=changes)
    more = (*PRIME, "eval.problems=0", "training.max_steps=3")
    run = train(*more, resume=resume, observe=lambda event, details: said.append(str(details)))
    assert any("the checkpoint has no state of process_rewards" in text for text in said)
    assert ["prm/loss" in step for step in rows(run / "metrics.jsonl")] == [False, False, True]


def test_a_process_reward_model_whose_gradients_overflow_stops_the_run(train):
    with pytest.raises(DivergedError, match=r"at step 2 \(process_rewards\)"):
        train(*PRIME, *QUIET, "prime.beta=1e30")
