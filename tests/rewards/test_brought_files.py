"""Files as the documentation of TRL and verl has them train a step as they are: `brought/`, rewards and data."""

import json
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.rewards.signatures import form_of
from tests.commands import invoke
from tests.make_checkpoint import make_checkpoint

HERE = Path(__file__).parent / "brought"
RUN = """
[model]
path = "{model}"
[task]
name = "{task}"
[{task}]
path = "{path}"
heldout_fraction = 0.0
{keys}
[plugins]
search_paths = ["{here}"]
{rewards}
[training]
max_steps = 1
batch_size = 2
group_size = 2
max_tokens = 8
[warmup]
steps = 0
[eval]
problems = 0
[logging]
rollouts_every = 1
"""


@pytest.mark.slow(but=1)
@pytest.mark.parametrize(
    ("data", "keys", "rewards"),
    [
        ("trl_boxed", 'answer_field = "ground_truth"', {"trl_rewards.boxed": "trl"}),
        ("trl_tasks", 'answer_field = ""', {"trl_rewards.math_reward_func": "trl", "trl_rewards.reward_len": "trl"}),
        ("trl_chat", 'answer_field = ""', {"trl_rewards.format_reward_func": "trl", "trl_rewards.async_reward": "trl"}),
        ("verl_gsm8k", "", {"verl_rewards.compute_score": "verl", "verl_rewards.compute_score_dict": "verl"}),
        ("verl_gsm8k", "", {"verl_rewards.compute_score_batched": "verl_batch"}),
    ],
)
def test_a_step_is_trained_on_files_of_others(cwd, data, keys, rewards):
    task, path = "jsonl", HERE / f"{data}.jsonl"
    if data.startswith("verl"):
        parquet = pytest.importorskip("pyarrow.parquet", reason="needs the extra parquet")
        from pyarrow import Table

        rows = [json.loads(line) for line in path.read_text().splitlines()]
        task, path = "parquet", cwd / "train.parquet"
        parquet.write_table(Table.from_pylist(rows), path)
    model = make_checkpoint(cwd / "model", chat=data in ("trl_chat", "verl_gsm8k"))
    named = "".join(f'[[rewards]]\nname = "{name}"\n' for name in rewards)
    Path("run.toml").write_text(RUN.format(task=task, path=path, keys=keys, here=HERE, rewards=named, model=model))
    forms = [form_of(bound).name for bound in load("run.toml").all("reward")]
    assert forms == [*rewards.values()]
    invoke("train", "run.toml", "--plain", code=0)
    (row,) = (json.loads(line) for line in Path("runs/run/metrics.jsonl").read_text().splitlines())
    assert row["reward/failed"] == 0
    assert {f"reward/{name}" for name in rewards} <= row.keys()
