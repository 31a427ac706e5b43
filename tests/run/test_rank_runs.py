"""Whole runs on two ranks: what they write is what one process writes, and they stop, resume and fail together."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import tomli

from retrain.engines.delegating import DelegatingSampler
from retrain.protocols import ALONE, Sampler
from retrain.run.distributed_wrappers import RemoteSampler, SharedSampler
from retrain.storage.run_directory import RunDirectory
from tests.run.test_environment_runs import PLUGINS
from tests.run.test_environment_runs import RUN as GAME
from tests.small_runs import TOML, same
from tests.training.rank_cases import whole_run

pytest_plugins = ["tests.training.rank_pair"]
ROOT = Path(__file__).parents[2]
EXACT = ("model.dtype=float32", "torch.dtype=float32", "optimizer.eps=1e-4")
"""AdamW with its eps of 1e-8 makes whole steps of gradients that are rounding alone: ranks and lanes differ there."""
RECIPES = sorted({*(ROOT / "configs").glob("*.toml")} - {ROOT / "configs" / "smollm2.toml"})
AHEAD = ("rollout.overlap=1", "reward_pool.workers=1")
ENDS = ("training.max_steps=6", 'training.stop_when={metric="optim/lr", patience=3}', 'checkpoint.best="eval/accuracy"')
LANES = ("rollout.overlap=1", "environment.workers=2")
SOURCES = (
    'source=[{name = "replay", params = {share = 0.4, max_staleness = 4}}]',
    f'expert={{path = "{ROOT}/configs/data/addition_expert.jsonl", ratio = 0.25}}',
    'loss=[{name = "ppo_clip"}, {name = "sft"}]',
)
"""Rows beside the rollouts: stored groups, and an expert's answers."""
TINY = """
training.max_steps=2 training.batch_size=2 training.group_size=4 training.max_tokens=12 training.threads=1
warmup.steps=12 warmup.batch_size=8 warmup.warmup_steps=2 warmup.problems=96
eval.problems=0 checkpoint.every=0 reward_pool.workers=0
""".split()  # noqa: SIM905


def tiny(file):
    """TINY; what an environment shows and what its demonstrations say needs the tokens that the recipe gives."""
    episodes = "environment" in tomli.loads(file.read_text())
    return [option for option in TINY if not (episodes and option.startswith("training.max_tokens"))]


ALONE_RUN = """
import sys
from pathlib import Path

import torch
from transformers import Qwen3ForCausalLM  # with it comes all that transformers imports

def parts():
    return {name for name in sys.modules if name.startswith("torch.distributed")}

before = parts()
from retrain.config.load import load
from retrain.run.session import Resume, run

run(load(Path("run.toml"), ["training.max_steps=1"]), Resume(), lambda *_: None)
assert not torch.distributed.is_initialized()
assert parts() <= before, parts() - before
"""


@pytest.fixture
def ask(request, pair, tmp_path):
    """`ask(name, *overrides, ranks=...)`: train the small run on two ranks, or as one process."""

    def go(name, *overrides, file=None, ranks=2, stop=-1, mode="new"):
        toml = file or tmp_path / "run.toml"
        if file is None:
            toml.write_text(TOML)
        every = [f'logging.dir="{tmp_path}/runs"', f"logging.name={name}", *EXACT, *overrides]
        if ranks == 1:
            return whole_run(ALONE, str(toml), every, {}, stop, mode)
        group = pair if ranks == 2 else request.getfixturevalue("trio")
        return group.run("whole_run", str(toml), every, {"RETRAIN_CACHE": os.environ["RETRAIN_CACHE"]}, stop, mode)

    return go


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((), id="in turn"),
        pytest.param((*AHEAD, *ENDS), id="overlap", marks=pytest.mark.ranks),
        pytest.param(SOURCES, id="sources", marks=pytest.mark.ranks),
    ],
)
def test_two_ranks_write_what_one_process_writes(ask, tmp_path, overrides):
    assert ask("two", *overrides)["errors"] == [None, None]
    assert ask("one", *overrides, ranks=1)["errors"] == [None]
    runs = tmp_path / "runs"
    assert same(runs / "two", runs / "one") <= 1e-6
    files = [
        {path.relative_to(run) for path in run.rglob("*") if not {"checkpoints", "best"} & {*path.parts}}
        for run in (runs / "two", runs / "one")
    ]
    assert files[0] == files[1]
    assert json.loads((runs / "two" / "environment.json").read_text())["ranks"] == 2
    shards = {path.name for path in (runs / "two" / "checkpoints" / "step-000004").iterdir()}
    assert {"policy.rank-00000.safetensors", "policy.rank-00001.safetensors"} <= shards


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides", [pytest.param((), id="in turn", marks=pytest.mark.ranks), pytest.param(LANES, id="overlap")]
)
def test_two_ranks_play_the_episodes_of_one_process(ask, tmp_path, overrides):
    toml = tmp_path / "game.toml"
    toml.write_text(GAME)
    assert ask("two", *overrides, file=toml)["errors"] == [None, None]
    assert ask("one", *overrides, file=toml, ranks=1)["errors"] == [None]
    assert same(tmp_path / "runs" / "two", tmp_path / "runs" / "one") <= 1e-6


@pytest.mark.slow
def test_an_environment_that_fails_ends_every_rank(ask, tmp_path):
    toml, breaks = tmp_path / "game.toml", 'environment.name="talking_worlds.breaks"'
    toml.write_text(GAME)
    errors = ask("broken", PLUGINS, "guess={}", "warmup.steps=0", breaks, file=toml)["errors"]
    assert [error[2] for error in errors] == [1, 1]
    assert all("episodes failed" in error[1] for error in errors)


@pytest.mark.ranks
@pytest.mark.parametrize("file", RECIPES, ids=lambda file: file.stem)
def test_ranks_train_every_recipe_as_one_process_does(ask, tmp_path, monkeypatch, file):
    monkeypatch.chdir(ROOT)
    assert ask("one", *tiny(file), file=file, ranks=1)["errors"] == [None]
    for ranks in (2, 3) if file.stem in ("mix", "prime", "prime_lora") else (2,):
        assert ask(f"{ranks}", *tiny(file), file=file, ranks=ranks)["errors"] == [None] * ranks
        assert same(tmp_path / "runs" / f"{ranks}", tmp_path / "runs" / "one") <= 1e-6


@pytest.mark.ranks
def test_a_run_goes_from_world_to_world(ask, tmp_path):
    runs, worlds = tmp_path / "runs", (2, 1, 3, 2)
    for place, size in enumerate(worlds):
        last = place == len(worlds) - 1
        found = ask("moving", "training.max_steps=8", ranks=size, stop=-1 if last else 2 * place + 1, mode="auto")
        assert found["errors"] == [None] * size if last else [error[2] for error in found["errors"]] == [75] * size
        if place:
            text = f"ranks: {worlds[place - 1]} -> {size}; sums round differently, so results are not bit-identical"
            assert f"resuming with {text}" in found["said"]
    ask("one", "training.max_steps=8", ranks=1)
    assert same(runs / "moving", runs / "one") <= 1e-6


@pytest.mark.parametrize("shared", [SharedSampler, RemoteSampler])
def test_every_verb_of_a_sampler_has_a_version_for_several_ranks(shared):
    """A verb that is added to the protocol must say there what the other ranks do when rank 0 does it."""
    assert verbs(Sampler) <= {*vars(shared), *vars(DelegatingSampler)}


def test_rank_0_alone_writes_the_run_directory():
    shared = {name for name in verbs(RunDirectory) if hasattr(vars(RunDirectory)[name], "__wrapped__")}
    # All ranks write and read checkpoints together, each its shards, and rank 0 verifies and rewinds. Findings, which
    # write facts, exist on rank 0 alone.
    assert verbs(RunDirectory) - shared == {"restore", "save_checkpoint", "write_facts"}


def verbs(kind: type) -> set[str]:
    """Public methods of a class."""
    return {name for name, value in vars(kind).items() if callable(value) and not name.startswith("_")}


@pytest.mark.slow
def test_a_run_that_resumes_in_its_own_world_has_the_same_bits(ask, tmp_path):
    ask("whole")
    ask("stopped", stop=2)
    assert ask("stopped", stop=-1, mode="auto")["errors"] == [None, None]
    assert same(tmp_path / "runs" / "stopped", tmp_path / "runs" / "whole", tolerance=0) == 0


@pytest.mark.slow
def test_a_plugin_that_differs_between_ranks_ends_the_run_by_its_name(ask, tmp_path):
    plugin = tmp_path / "wobbly.py"
    plugin.write_text(
        "import os\n\ndef wobbly(rewards):\n    return [reward + os.getpid() % 97 for reward in rewards]\n"
    )
    found = ask("wobbly", f'plugins.search_paths=["{tmp_path}"]', 'algorithm.advantage_mode="wobbly:wobbly"')
    for kind, text, code in found["errors"]:
        assert (kind, code) == ("UserCodeError", 1)
        assert "wobbly" in text
        assert "is not deterministic: advantages of step 0 differs between ranks" in text


@pytest.mark.slow
def test_credit_of_any_type_is_compared(ask, tmp_path):
    code = "@transform('narrow')\ndef narrow(advantages):\n    return advantages.bfloat16()\n"
    (tmp_path / "narrow.py").write_text(f"from retrain import transform\n\n{code}")
    narrow = (f'plugins.search_paths=["{tmp_path}"]', 'algorithm.transform_mode="narrow.narrow"')
    assert ask("narrow", "training.max_steps=1", *narrow)["errors"] == [None, None]


@pytest.mark.slow
def test_an_error_on_rank_0_alone_ends_every_rank(ask, tmp_path):
    ask("taken", "training.max_steps=1")
    found = ask("taken", "training.max_steps=1")  # rank 0 alone looks at the directory
    assert [code for _, _, code in found["errors"]] == [2, 2]
    assert all("holds a finished run" in text for _, text, _ in found["errors"])


@pytest.mark.slow
def test_a_run_without_ranks_imports_no_more_of_torch_distributed_than_transformers_does(tmp_path):
    (tmp_path / "run.toml").write_text(TOML)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", ALONE_RUN], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
