"""The examples do what they say, and every TOML in plugins/ is valid."""

import re
from pathlib import Path

import pytest
import torch

from plugins.borrowed_rewards import accuracy, compute_score
from plugins.decorated import fading, progress
from plugins.my_reward import brevity
from plugins.stateful import RunningBaseline
from retrain import Batch, compute_composable_advantages
from retrain.config.load import load
from retrain.registry import find
from tests.commands import invoke

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def _in_the_repository(monkeypatch):
    monkeypatch.chdir(ROOT)


def credit(rewards, planning=None, **modes):
    logprobs = [[-0.5, -1.0] for _ in rewards]
    masks = planning or [[0, 0] for _ in rewards]
    return compute_composable_advantages(rewards, logprobs, masks, **modes).token_advs


def test_plain_advantage():
    name = "plugins.my_advantages.hipa_like_advantages"
    assert credit([1.0, 0.0], advantage_mode=name) == [[1.0, 1.0], [-1.0, -1.0]]


def test_advantage_with_params():
    name = "plugins.my_advantages.asymmetric_advantages"
    params = {"scale": 2.0, "penalty": 0.25}
    assert credit([1.0, 0.0], advantage_mode=name, advantage_params=params) == [[1.0, 1.0], [-0.25, -0.25]]


def test_context_transform():
    name = "plugins.my_transform.my_transform"
    assert credit([1.0, 0.0], transform_mode=name, transform_params={"scale": 3.0}) == [[1.5, 1.5], [-1.5, -1.5]]


def test_whole_algorithm(tmp_path):
    from plugins.my_algorithm import my_algorithm
    from retrain import TransformContext

    ctx = TransformContext(
        [], [[-0.5, -1.0]] * 2, [[1, 0], [0, 1]], params={"execution_weight": 0.0}, rewards=[1.0, 0.0]
    )
    assert my_algorithm(ctx).token_advs == [[0.5, 0.0], [-0.0, -0.5]]


def test_decorated_transform_reads_its_signal():
    mask = torch.tensor([[False, True, True, True, True], [False, True, False, False, False]])
    assert progress(mask).tolist() == [[0.0, 0.25, 0.5, 0.75, 1.0], [0.0, 1.0, 0.0, 0.0, 0.0]]
    spread = fading(mask.float(), progress(mask), floor=0.3)
    assert torch.allclose(spread[0], torch.tensor([0.0, 0.75, 0.5, 0.3, 0.3]))


def test_reward():
    assert brevity("so 12", "12") == 1.0
    assert brevity("so 12" + " " * 35, "12") == 0.5
    assert brevity("so 13", "12") is None


def test_borrowed_rewards_keep_the_signatures_of_other_trainers():
    assert accuracy(completions=["so 12", "so 12\nso 3", ""], answer=["12", "12", "1"], prompts=[]) == [1.0, 0.0, 0.0]
    assert compute_score("addition", "so 12", "12") == {"score": 1.0, "characters": 5.0}


def test_stateful_advantage_remembers_earlier_steps_and_checkpoints():
    part, again = RunningBaseline(decay=0.5), RunningBaseline(decay=0.5)
    first = torch.tensor([1.0, 0.0])
    assert part(first).tolist() == [0.5, -0.5]
    assert part.after(batch_of(first)) == {"running_baseline/value": 0.5}
    part.after(batch_of(torch.ones(2)))
    again.load_state_dict(part.state_dict())
    assert again(first).tolist() == part(first).tolist() == [0.25, -0.75]


def batch_of(rewards):
    blank = torch.zeros(len(rewards), 1)
    mask = blank.bool()
    return Batch(blank.long(), mask, mask, blank, rewards, mask[:, 0], mask[:, 0], mask[:, 0], mask[:, 0], blank)


def test_tracker_writes_a_line_per_metric(tmp_path):
    made = find("tracker", "plugins.my_tracker.Csv").bind({"name": "all.csv"}).build({"run_dir": tmp_path})
    made.log(3, {"reward/mean": 0.5, "eval/accuracy": 0.25})
    made.completions(3, [])
    made.close()
    assert (tmp_path / "all.csv").read_text().split() == ["3,reward/mean,0.5", "3,eval/accuracy,0.25"]


EXAMPLES = pytest.mark.parametrize("file", sorted((ROOT / "plugins").glob("*.toml")), ids=lambda file: file.stem)


@EXAMPLES
def test_example_configurations_are_valid(file):
    assert not load(file).warnings


@pytest.mark.slow(but=3)
@EXAMPLES
def test_examples_run(file, tmp_path, monkeypatch):
    monkeypatch.setenv("RETRAIN_CACHE", str(tmp_path / "cache"))
    sizes = {"training.max_steps": 2, "training.batch_size": 2, "training.group_size": 2, "training.max_tokens": 8}
    sizes |= {"warmup.steps": 2, "warmup.batch_size": 2, "eval.problems": 2, "reward_pool.workers": 0}
    sizes |= {"logging.dir": f'"{tmp_path}"', "training.seed": 3}
    flags = [text for key, value in sizes.items() for text in ("--set", f"{key}={value}")]
    invoke("train", str(file), "--plain", *flags, code=0)
    assert len((tmp_path / file.stem / "metrics.jsonl").read_text().splitlines()) == 2


@pytest.mark.parametrize("file", sorted((ROOT / "plugins").glob("*.py")), ids=lambda file: file.stem)
def test_examples_import_the_public_surface_only(file):
    imports = re.findall(r"^\s*(?:from|import) (retrain\S*)", file.read_text(), re.MULTILINE)
    assert set(imports) <= {"retrain"}


def test_an_environment_answers_and_rewards():
    from random import Random

    from plugins.my_environment import MyNumbers, my_countdown

    task = MyNumbers(0)
    assert {problem.answer for problem in task.heldout(4)} == {"1", "2", "3", "4"}
    problem = task.problem(3)
    game = my_countdown(problem.answer, Random(0), lives=2)
    assert next(game) is None
    wrong = game.send("many")
    assert (wrong.text, wrong.reward, wrong.metrics) == ("no, 1 left\n", -0.1, {"hints": False})
    with pytest.raises(StopIteration) as end:
        game.send(problem.replies[-1])
    assert end.value.value == 1.0
