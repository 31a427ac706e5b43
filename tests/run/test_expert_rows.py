"""Runs with an expert's rows in the batch."""

import gzip
import json

import pytest

from retrain.config.load import load
from retrain.errors import ConfigError, DataError
from retrain.run.build import build
from retrain.run.collectors.rounds import collect
from retrain.run.session import Resume
from retrain.storage.run_directory import RunDirectory
from tests.make_checkpoint import make_checkpoint
from tests.run.test_collect import rollout
from tests.small_runs import digest, rows

pytestmark = pytest.mark.numeric


def conversation(problem, answer):
    return {"messages": [{"role": "user", "content": problem}, {"role": "assistant", "content": answer}]}


@pytest.fixture
def expert(tmp_path):
    """Seven rows of an expert, and the overrides that mix them in: 2 prompts x 4 and 3 or 4 expert rows."""
    file = tmp_path / "expert.jsonl"
    lines = [conversation(f"{10 + n}+{20 + n}?\n", f"let me think\nso {30 + 2 * n}") for n in range(7)]
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return file, (f'expert.path="{file}"', "expert.ratio=0.25", 'loss=[{name="ppo_clip"}, {name="sft"}]')


@pytest.fixture
def parts(toml, tmp_path, expert):
    """The built parts of the small run with an expert."""
    opened = []

    def go(*overrides):
        loaded = load(toml, [f'logging.dir="{tmp_path}/runs"', *expert[1], *overrides])
        with RunDirectory(tmp_path / "runs" / "parts", "fresh", loaded.config.checkpoint, lambda *_: None) as directory:
            opened.append(build(loaded, directory, lambda *_: None))
        return opened[-1]

    yield go
    for one in opened:
        one.close()


def test_every_step_trains_on_both_and_counts_the_passes(train, expert):
    run = train(*expert[1])
    steps = rows(run / "metrics.jsonl")
    assert [row["expert/epoch"] for row in steps] == [0, 0, 1, 1], "3 of 7 rows a step: 3, 6, 9, 12"
    for row in steps:
        assert row["rollout/completions"] == 8
        assert row["mix/mu"] == 0.1
        assert row["loss/total"] == pytest.approx(0.9 * row["loss/ppo_clip"] + 0.1 * row["loss/sft"])
        assert 0 <= row["groups/informative"] <= 1
        assert row["groups/informative"] * 2 + sum(row[f"skipped/{name}"] for name in NAMES) == 2
    stored = gzip.decompress((run / "rollouts" / "step-000000.jsonl.gz").read_bytes()).splitlines()
    assert len(stored) == 8
    assert all("advantages" in json.loads(line) for line in stored)


NAMES = ("all_correct", "all_wrong", "other")


@pytest.mark.slow
def test_without_a_term_for_it_nothing_changes(train, expert):
    with_file = train(expert[1][0], name="file")
    assert digest(with_file) == digest(train(name="plain"))
    assert not {"mix/mu", "loss/sft", "expert/epoch"} & rows(with_file / "metrics.jsonl")[0].keys()


@pytest.mark.slow
def test_imitation_lowers_the_experts_loss(train, expert):
    run = train(*expert[1], "mix.mu=0.9", "training.max_steps=6", "training.lr=1e-3")
    steps = rows(run / "metrics.jsonl")
    assert steps[-1]["loss/sft"] < steps[0]["loss/sft"] - 0.1


@pytest.mark.slow
@pytest.mark.parametrize(
    "options", [(), ("training.epochs=2", "training.minibatches=2", "algorithm.transform_mode=gtpo_sepa")]
)
def test_a_resumed_run_equals_an_uninterrupted_one(resumed, expert, options):
    run = resumed(*expert[1], "mix.schedule=chord", "mix.warmup=2", "mix.decay=2", *options)
    assert [row["mix/mu"] for row in rows(run / "metrics.jsonl")] == pytest.approx([0, 0.25, 0.5, 0.26])


@pytest.mark.slow
def test_other_expert_data_under_the_same_path_is_refused_unless_allowed(train, expert):
    file, options = expert
    train(*options, "training.max_steps=2")
    file.write_text(file.read_text().replace("so 30", "so 31"))
    more = (*options, "training.max_steps=3")
    with pytest.raises(ConfigError, match=r"expert\.data: differs"):
        train(*more, resume=Resume("auto", allow_change=["training.max_steps"]))
    run = train(*more, resume=Resume("auto", allow_change=["training.max_steps", "expert.data"]))
    assert len(rows(run / "metrics.jsonl")) == 3


def test_a_bad_file_stops_the_run_before_the_model_is_loaded(train, expert, monkeypatch):
    file, options = expert
    file.write_text(file.read_text() + "oops\n")
    monkeypatch.setattr("retrain.run.build.load_model", None)
    with pytest.raises(DataError, match=r"expert\.jsonl:8: not JSON"):
        train(*options)


def test_a_step_whose_rollouts_are_all_dropped_still_learns_from_the_expert(train, expert):
    """No reward tells completions apart, so that every group is dropped at collection."""
    options = ("rewards=[{name='exact'}]", "rollout.resample=uninformative", "rollout.max_resample=1")
    run = train(*expert[1], *options, "training.max_steps=2")
    steps = rows(run / "metrics.jsonl")
    for row in steps:
        assert row["reward/accuracy"] == 0
        assert row["groups/informative"] == 0
        assert sum(row[f"skipped/{name}"] for name in NAMES) == 4, "two prompts, sampled twice"
        assert row["mix/mu"] == 0.1
        assert row["loss/total"] == pytest.approx(0.1 * row["loss/sft"])
        assert row["grad/norm"] > 0
        assert "mismatch/kl" not in row
        assert "parity/logp_diff_mean" not in row
    assert steps[1]["loss/sft"] != steps[0]["loss/sft"]


@pytest.mark.slow
@pytest.mark.parametrize("term", ["sft", "sft_phi"])
def test_terms_that_read_a_reference_or_scores_go_on_without_rollouts(train, expert, term):
    loss = f'loss=[{{name="ppo_clip"}}, {{name="kl", weight=0.1}}, {{name="entropy", weight=0.01}}, {{name="{term}"}}]'
    options = ("rewards=[{name='exact'}]", "rollout.resample=uninformative", "rollout.max_resample=1", loss)
    run = train(*expert[1][:2], *options, "training.max_steps=1", "algorithm.transform_mode=gtpo_sepa")
    (row,) = rows(run / "metrics.jsonl")
    assert row["grad/norm"] > 0
    assert row["loss/kl"] == row["loss/entropy"] == 0


def test_an_expert_alone_can_be_imitated(train, expert):
    (row,) = rows(train(*expert[1][:2], 'loss=[{name="sft"}]', "training.max_steps=1") / "metrics.jsonl")
    assert row["loss/sft"] == row["loss/total"] > 0
    assert not {"mix/mu", "loss/ppo_clip"} & row.keys()


def test_expert_rows_stand_behind_the_rollouts_in_groups_of_their_own(parts):
    built = parts()
    experts = built.row_sources["expert"].take(0, [])[0]
    batch = built.layout.batch([rollout(4, 1.0, 3), rollout(4, 0.0, 1), rollout(2, 0.0, 2)], 5, experts)
    assert batch.is_expert.tolist() == [False] * 3 + [True] * 3
    assert batch.group_ids.tolist() == [4, 4, 2, 5, 6, 7]
    assert batch.sampler_logprobs[3:].abs().sum() == batch.advantages.abs().sum() == 0
    assert batch.rewards[3:].tolist() == [0.0] * 3
    assert batch.lengths.tolist() == batch.response_mask.sum(-1).tolist()
    for row, one in zip(range(3, 6), experts, strict=True):
        assert batch.input_ids[row][batch.attention_mask[row]].tolist() == list(one.ids)
        assert batch.input_ids[row][batch.response_mask[row]].tolist() == list(one.ids[slice(*one.spans[0])])
    alone = built.layout.batch([], 5, experts)
    assert alone.is_expert.all()
    assert alone.group_ids.tolist() == [0, 1, 2]


def test_the_experts_answers_to_the_prompts_of_the_step(parts, toml, expert):
    problems = parts().task
    lines = [conversation(problems.problem(index).prompt, f"so {index}") for index in (3, 0, 5, 1, 9)]
    expert[0].write_text("".join(json.dumps(line) + "\n" for line in lines))
    built = parts("expert.same_prompts=true")

    def answers(collection):
        batch = collection.batch
        return [
            built.chat.decode(ids[mask].tolist())
            for ids, mask in zip(batch.input_ids[batch.is_expert], batch.response_mask[batch.is_expert], strict=True)
        ]

    first = collect(built, 0, 0)
    assert answers(first)[:2] == ["so 0", "so 1"]
    assert built.row_sources["expert"].state_dict() == {"epoch": 0, "offset": 1}
    assert answers(collect(built, 1, first.cursor))[0] == "so 3"


def test_rows_too_long_for_the_model_are_left_out_and_told(train, tmp_path):
    make_checkpoint(tmp_path / "model", "gpt2")
    lines = [conversation("what is it?\n", "long " * (300 if n % 3 == 0 else 1)) for n in range(9)]
    (tmp_path / "expert.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    options = (
        f'model.path="{tmp_path}/model"',
        "warmup.steps=0",
        "eval.problems=0",
        "training.max_steps=1",
        f'expert.path="{tmp_path}/expert.jsonl"',
        "expert.ratio=0.5",
        'loss=[{name="ppo_clip"}, {name="sft"}]',
    )
    said = []
    run = train(*options, observe=lambda event, details: said.append(str(details)))
    assert any("3 of 9 rows are longer than the model's 256 tokens; they are left out" in text for text in said)
    assert rows(run / "metrics.jsonl")[0]["expert/epoch"] == 1, "six rows of six"
    (tmp_path / "expert.jsonl").write_text(json.dumps(lines[0]) + "\n")
    with pytest.raises(DataError, match="1 of 1 rows are longer"):
        train(*options, name="long")
