"""What may be resumed from where, and that a refusal costs nothing of what is there."""

import json
import re
import signal
import sys
from shutil import rmtree

import pytest

from retrain.errors import ConfigError, Preempted, StorageError
from retrain.run.reopen import reopen
from retrain.run.session import Resume
from retrain.storage import checkpoint
from tests.small_runs import digest, rows

pytestmark = pytest.mark.numeric

DATA = ("task.name=jsonl", "warmup.steps=0", "eval.problems=0")


def content(run):
    return {
        file.relative_to(run).as_posix(): file.read_bytes()
        for file in sorted(run.rglob("*"))
        if file.is_file() and file.name not in ("lock", "status.json")
    }


@pytest.fixture
def data(tmp_path):
    """A jsonl task and the override that names it."""
    file = tmp_path / "problems.jsonl"
    lines = [json.dumps({"prompt": f"{n}+{n}?\n", "answer": str(2 * n)}) for n in range(40)]
    file.write_text("\n".join(lines))
    return file, f'jsonl.path="{file}"'


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("where", ["step-000000", "step-000003", "bad-name", "", "../model", "step-000002/state.json"])
def test_a_checkpoint_that_is_not_there_leaves_the_run_as_it_was(train, where):
    run = train()
    before = content(run)
    with pytest.raises(ConfigError, match=f"{where}: is not a checkpoint"):
        train(resume=Resume("auto", run / "checkpoints" / where))
    assert content(run) == before


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_a_finished_run_without_checkpoints_has_nothing_to_resume_and_loses_nothing(train, mode):
    run = train("training.max_steps=1")
    rmtree(run / "checkpoints")
    before, heard = content(run), []
    train("training.max_steps=1", resume=Resume(mode), observe=lambda event, details: heard.append(details))
    assert content(run) == before
    assert any("there is nothing to resume" in str(details.get("text")) for details in heard)
    with pytest.raises(ConfigError, match=r"training\.max_steps"):
        train("training.max_steps=2", resume=Resume(mode))
    allowed = Resume(mode, allow_change=["training.max_steps"])
    with pytest.raises(ConfigError, match="is finished, and its checkpoints are deleted; train it again with --fresh"):
        train("training.max_steps=2", resume=allowed)
    assert content(run) == before
    assert json.loads((run / "status.json").read_text())["outcome"] == "finished"


@pytest.mark.slow
def test_a_checkpoint_of_another_run_starts_a_new_run_and_never_overwrites_one(train):
    other, run = train("training.seed=7", name="other"), train()
    before, source = content(run), other / "checkpoints" / "step-000002"
    with pytest.raises(ConfigError, match="belongs to another"):
        train("training.seed=7", resume=Resume("auto", source))
    assert content(run) == before
    with pytest.raises(ConfigError, match=r"training\.seed: differs"):
        train(name="fork", resume=Resume("auto", source))
    fork = train("training.seed=7", name="fork", resume=Resume("auto", source))
    assert digest(fork) == digest(other)
    assert [row["step"] for row in rows(fork / "metrics.jsonl")] == [2, 3]


@pytest.mark.slow
def test_going_back_drops_the_checkpoints_of_the_course_that_is_left(train, monkeypatch):
    run = train()
    back = Resume("auto", run / "checkpoints" / "step-000002", allow_change=["training.lr"])
    with monkeypatch.context() as patch:
        patch.setattr("retrain.run.loop.train", _interrupted)
        with pytest.raises(KeyboardInterrupt):
            train("training.lr=0.01", resume=back)
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-000002"]


@pytest.mark.slow
def test_a_run_that_goes_on_is_opened_at_its_newest_step(train):
    """The model of the earlier end would be taken for that of the step where the run was stopped."""

    def stop(event, details):
        if event == "step" and details["step"] == 2:
            signal.raise_signal(signal.SIGTERM)

    run = train("training.max_steps=2")
    with pytest.raises(Preempted, match="after step 3"):
        train(resume=Resume("auto", allow_change=["training.max_steps"]), observe=stop)
    trained = reopen(run, (), lambda event, details: None, "weights")
    saved = checkpoint.load(run / "checkpoints" / "step-000003")["policy"]["model"]
    assert trained.steps == 3
    assert all(value.equal(saved[name]) for name, value in trained.policy.state_dict()["model"].items())


@pytest.mark.slow
def test_a_key_that_is_new_since_the_run_was_started_is_no_change(train, stopped, tmp_path):
    options = ("algorithm.transform_mode=process_rloo", "prime.lr=1e-3")
    whole = train(*options, name="whole")
    stopped(*options, steps=2)
    forget(tmp_path / "runs" / "run")
    with pytest.raises(ConfigError, match=r"prime\.delay: .* null -> 1"):
        train(*options, "prime.delay=1", resume=Resume("auto"))
    with pytest.raises(ConfigError, match=r"optimizer\.eps: .* 1e-08 -> 1e-06"):
        train(*options, "optimizer.eps=1e-6", resume=Resume("auto"))
    said = []
    run = train(*options, resume=Resume("auto"), observe=lambda event, details: said.append(str(details)))
    assert not [text for text in said if "resuming with" in text]
    assert digest(run) == digest(whole)


def forget(run):
    """Make the run one of a version before some keys."""
    config = json.loads((run / "config.resolved.json").read_text())
    (saved,) = (run / "checkpoints").iterdir()
    state = checkpoint.load(saved)
    for one in (config, state["started_with"]["config"]):
        del one["optimizer"]["eps"], one["logging"]["observe"], one["reward_pool"]["env"]
        (process,) = one["components"]["transform"]
        del process["params"]["delay"]
    (run / "config.resolved.json").write_text(json.dumps(config))
    checkpoint.save(run / "checkpoints", checkpoint.step_of(saved), state, keep=1)


@pytest.mark.slow
def test_other_code_of_a_plugin_is_refused_unless_allowed(train, stopped, cwd):
    (cwd / "divisor.py").write_text("BY = 2\n")
    (cwd / "parity_reward.py").write_text(
        "from divisor import BY\n\ndef even(completion):\n    return float(len(completion) % BY == 0)\n"
    )
    reward = 'rewards=[{name = "parity_reward.even"}]'
    stopped(reward, steps=2)
    before = content(cwd / "runs" / "run")
    (cwd / "divisor.py").write_text("BY = 3\n")
    for module in ("divisor", "parity_reward"):
        del sys.modules[module]  # as in the new process that resumes
    with pytest.raises(ConfigError, match=r'plugins\.divisor: differs .*"\w+" -> "\w+"; --allow-change plugins'):
        train(reward, resume=Resume("auto"))
    assert content(cwd / "runs" / "run") == before
    said = []
    allowed = Resume("auto", allow_change=["plugins"])
    train(reward, resume=allowed, observe=lambda event, details: said.append(str(details)))
    assert any("resuming with plugins.divisor" in text for text in said)


@pytest.mark.slow
@pytest.mark.parametrize("damage", [{"loop": [1]}, {"loop": {}}, {"policy": {}}, {"started_with": "x"}])
def test_a_checkpoint_that_is_whole_but_not_what_a_run_saves_is_a_storage_error(train, stopped, tmp_path, damage):
    stopped(steps=2)
    (saved,) = (tmp_path / "runs/run/checkpoints").iterdir()
    checkpoint.save(saved.parent, checkpoint.step_of(saved), checkpoint.load(saved) | damage, keep=1)
    with pytest.raises(StorageError, match="not as a run writes it"):
        train(resume=Resume("auto"))


def _interrupted(*_):
    raise KeyboardInterrupt


@pytest.mark.slow
def test_other_problems_under_the_same_path_are_refused_unless_allowed(train, data):
    file, option = data
    run = train(*DATA, option, "training.max_steps=2")
    before = content(run / "checkpoints")
    file.write_text(file.read_text() + '\n{"prompt": "one more", "answer": "1"}')
    more = (*DATA, option, "training.max_steps=3")
    with pytest.raises(ConfigError, match=r"task\.data: differs"):
        train(*more, resume=Resume("auto", allow_change=["training.max_steps"]))
    assert content(run / "checkpoints") == before
    said = []
    train(
        *more,
        # The built-in model makes its tokenizer from the task's texts.
        resume=Resume("auto", allow_change=["training.max_steps", "task.data", "model.tokenizer"]),
        observe=lambda event, details: said.append(str(details)),
    )
    assert any("resuming with task.data" in text for text in said)
    assert any("resuming with model.tokenizer" in text for text in said)
    assert len(rows(run / "metrics.jsonl")) == 3


@pytest.mark.slow
def test_a_run_without_a_checkpoint_says_that_it_starts_over(train, stopped, tmp_path):
    said, run = [], tmp_path / "runs" / "run"
    stopped("training.max_steps=2", steps=1)
    rmtree(run / "checkpoints")
    train("training.max_steps=2", resume=Resume("auto"), observe=lambda event, details: said.append(str(details)))
    assert any("starting from step 0" in text for text in said)


def test_a_run_that_goes_on_with_other_software_or_threads_says_so(train, stopped, tmp_path):
    file = tmp_path / "runs" / "run" / "environment.json"
    stopped("training.max_steps=3", steps=1)
    environment = json.loads(file.read_text())
    environment["packages"]["torch"] = "2.10.0"
    file.write_text(json.dumps(environment | {"threads": 64, "platform": "another"}))
    texts = []
    for steps in (2, 3):  # the second resume has the environment that the first one recorded
        options = (f"training.max_steps={steps}",)
        resume = Resume("auto", allow_change=("training.max_steps",))
        train(*options, resume=resume, observe=lambda event, details: texts.append(str(details.get("text"))))
    [text] = [text for text in texts if "may differ in rounding" in text]
    assert re.search(r"run: packages\.torch 2\.10\.0 -> [\d.]+\S*, threads 64 -> \d+$", text)
