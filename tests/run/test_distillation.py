"""Runs with a teacher: another model, and the policy itself in hindsight."""

import pytest
import torch

from retrain.config.load import load
from retrain.errors import ConfigError, StorageError
from retrain.run.build import build
from retrain.run.collectors.rounds import collect
from retrain.run.session import Resume
from retrain.storage.run_directory import RunDirectory
from tests.small_runs import rows

EXACT = ("model.dtype=float32", "teacher.dtype=float32", "torch.dtype=float32", "rollout.engine=torch")
OPD = "algorithm.algorithm_mode=opd"
SDPO = ("algorithm.algorithm_mode=sdpo", "teacher.threshold=-1.0")
QUIET = ("eval.problems=0", "checkpoint.every=0", "logging.rollouts_every=0")


def gaps(run):
    return [row["teacher/gap"] for row in rows(run / "metrics.jsonl")]


@pytest.fixture
def teacher(train):
    """Return the folder of a model after more steps of the warm start."""
    return lambda steps: (
        train(*QUIET, "training.max_steps=0", f"warmup.steps={steps}", name=f"teacher-{steps}") / "model"
    )


@pytest.mark.slow
def test_a_policy_approaches_its_teacher(train, teacher):
    """The gap is minus the sampled KL divergence from the teacher, in nats per token."""
    path = f'teacher.model="{teacher(60)}"'
    changes = ("training.max_steps=16", "training.lr=1e-3", "training.batch_size=8", "training.temperature=1.0")
    found = gaps(train(*QUIET, OPD, path, *changes))
    assert found[0] < -0.1
    assert sum(found[-4:]) / 4 > 0.8 * found[0]


@pytest.mark.slow
def test_without_a_model_the_base_under_the_adapters_teaches(train):
    found = gaps(train(*QUIET, OPD, "model.lora={r = 2}", "training.max_steps=1", "torch.dtype=float32"))
    assert found == pytest.approx([0.0], abs=0.02)


@pytest.mark.slow
def test_a_run_is_not_resumed_with_another_teacher(train, stopped, teacher):
    first, other = (f'teacher.model="{teacher(steps)}"' for steps in (24, 36))
    stopped(OPD, first, name="cut")
    with pytest.raises((StorageError, ConfigError), match="teacher"):
        train(OPD, other, name="cut", resume=Resume("auto"))


@pytest.fixture
def parts(toml, tmp_path):
    overrides = [*SDPO, "teacher.weights=current", 'teacher.template="{hint}\\n{prompt}"', *EXACT[:1]]
    loaded = load(toml, [*overrides, "teacher.threshold=1.0", f'logging.dir="{tmp_path}"'])
    with RunDirectory(tmp_path / "run", "new", loaded.config.checkpoint, lambda *_: None) as directory:
        built = build(loaded, directory, lambda *_: None)
        yield built
        built.close()


def test_a_hint_is_the_first_other_success_of_the_group(parts):
    batch = collect(parts, 0, 0).batch
    rewards = torch.zeros(len(batch.rewards))
    rewards[[1, 2, 5]] = 1.0  # group 0: rows 1 and 2; group 1: row 5 alone; group 2: none
    batch = batch.replace(rewards=rewards)
    signal = parts.trained.pipeline.stateful["teacher_logprobs"]
    bound = next(stage for stage in parts.trained.pipeline.graph if stage.writes == "teacher_logprobs")
    found, metrics = signal(*(batch.column(name) for name in bound.reads))
    shown = {0: 1, 1: 2, 2: 1, 3: 1, 4: 5, 6: 5, 7: 5}
    for row in range(len(rewards)):
        mask = batch.response_mask[row]
        if row not in shown:
            assert torch.equal(found[row], batch.sampler_logprobs[row])
            continue
        expected = scored_after_hint(parts, batch, row, shown[row])
        torch.testing.assert_close(found[row][mask], expected, rtol=1e-4, atol=1e-4)
        assert not found[row][~mask].any()
    assert metrics["teacher/hints"] == pytest.approx(len(shown) / len(rewards))


def scored_after_hint(parts, batch, row, other):
    """Log-probs of the row's completion behind the other completion and the prompt, by plain transformers."""
    problem, _ = batch.problems[int(batch.group_ids[row])]
    hint = parts.chat.decode(batch.input_ids[other][batch.response_mask[other]].tolist()).strip()
    prompt = list(parts.chat.prompt(f"{hint}\n{problem.prompt}").ids)
    completion = batch.input_ids[row][batch.response_mask[row]].tolist()
    with torch.no_grad():
        logits = parts.trained.policy.model(torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
    scores = (logits.float() / parts.config.training.temperature).log_softmax(-1)
    return scores[range(len(completion)), completion]
