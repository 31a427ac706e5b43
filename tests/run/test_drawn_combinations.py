"""Combinations drawn from the registry, seeded: what is registered composes, whatever is added to it."""

import json
import random
from math import isfinite

import pytest

from retrain import registry
from retrain.config.load import load
from retrain.errors import ConfigError
from retrain.run.session import Resume, run
from tests.small_runs import rows

DRAWN = 40
SMALL = """
training.max_steps=2 training.batch_size=4 training.group_size=4 training.max_tokens=8 warmup.steps=0 eval.problems=0
checkpoint.every=0 logging.rollouts_every=0 reward_pool.workers=0 rollout.parity_every=1 task.name=addition
""".split()  # noqa: SIM905
CHANCE = """
from zlib import crc32

def chance(completion):
    return float(crc32(completion.encode()) % 2)

def brief(completion):
    return float(len(completion) < 8)

def spans(texts):
    return [[(0, 1)] if text else [] for text in texts]
"""
"""An untrained model is right by chance, and the first character of what it says is planning."""

OPTIONS = [  # key -> values to draw from, the default among them
    ("prime.update", ["after", "before", "none"]),
    ("prime.loss", ["ce", "dpo"]),
    ("prime.reference", ["frozen", "policy"]),
    ("prime.norm", ["batch", "none"]),
    ("prime.gamma", [1.0, 0.9]),
    ("mix.schedule", ["constant", "chord"]),
    ("sepa.schedule", ["linear", "auto"]),
    ("hicra.threshold_rule", ["ceil", "strict"]),
    ("hicra.use_planning_tokens", [False, True]),
    ("dca.beta", [0.1]),
    ("planning.detector", ["grams", "semantic", "by_chance.spans"]),
    ("rollout.resample", ["none", "uninformative"]),
    ("rollout.max_resample", [1]),
    ("rollout.mask_truncated", [False, False, False, True]),
    ("training.epochs", [1, 1, 2]),
    ("training.minibatches", [1, 1, 2]),
    ("optimizer.name", ["adamw", "adamw", "muon"]),
    ("rollout.engine", ["auto", "torch", "transformers"]),
    ("model.lora", [None, None, {"r": 2}]),
    ("surprisal_mask.rho", [0.0, 0.5]),
]


def named(kind):
    """Every built-in component of a kind."""
    return [component.name for component in registry.components(kind) if component.source == "built-in"]


def chain(rng, first):
    """`first` and up to three more stages; at most one of them corrects the sampler, and all their work is used."""
    names = {first, *rng.sample(named("transform"), rng.randrange(4))}
    names -= {"mis"} if {"tis", "mis"} <= names and first == "tis" else {"tis"} if "mis" in names else set()
    stages = [registry.find("transform", name) for name in rng.sample(sorted(names), len(names))]
    replacing = [stage for stage in stages if replaces(stage)]
    stages = [stage for stage in stages if stage not in replacing[1:]]
    stages.sort(key=lambda stage: (writes(stage) == "advantages", not replaces(stage)))
    for stage in stages:
        if writes(stage) != "advantages" and not any(writes(stage) in later.reads for later in stages[1:]):
            stages.append(next(other for other in registry.components("transform") if reads_on(other, writes(stage))))
    return [stage.name for stage in stages]


def replaces(stage):
    """Whether a transform takes the place of the advantages: at most one does, ahead of those that change them."""
    return writes(stage) == "advantages" and "advantages" not in stage.reads


def writes(stage):
    return registry.transform.traits_of(stage).writes


def reads_on(stage, column):
    return column in stage.reads and writes(stage) == "advantages"


def combination(index):
    """The overrides of one run; the names of each kind take turns, so that every one is drawn."""
    rng = random.Random(index)
    turn = {kind: named(kind)[index % len(named(kind))] for kind in ("advantage", "uncertainty", "filter", "reduction")}
    losses, transforms = named("loss"), named("transform")
    terms = {losses[index % len(losses)], *rng.sample(losses, rng.randrange(3)), rng.choice(["ppo_clip", "cispo"])}
    chosen = {
        "algorithm.advantage_mode": turn["advantage"],
        "algorithm.uncertainty_kind": turn["uncertainty"],
        "algorithm.filter": turn["filter"],
        "algorithm.reduction": turn["reduction"],
        "algorithm.transform_mode": chain(rng, transforms[index % len(transforms)]),
    }
    chosen |= {key: value for key, values in OPTIONS if (value := rng.choice(values)) is not None}
    if chosen["algorithm.advantage_mode"] == "gdpo":  # it needs several rewards
        chosen["rewards.1.name"] = "by_chance.brief"
    chosen["teacher.source"] = "hindsight"
    if any(
        registry.transform.traits_of(registry.find("transform", name)).correction
        for name in chosen["algorithm.transform_mode"]
    ):
        terms = {name for name in terms if "sampler_logprobs" not in registry.find("loss", name).reads}
    if chosen["prime.update"] == "none":
        chosen["prime.reference"] = "policy"
    weights = ", ".join(f'{{name = "{name}", weight = {rng.choice([0.1, 1.0])}}}' for name in sorted(terms))
    return [f"{key}={toml(value)}" for key, value in chosen.items()] + [f"loss=[{weights}]"]


def toml(value):
    return json.dumps(value) if not isinstance(value, dict) else "{r = 2}"


def drawn(options):
    """The configuration without the drawn keys that nothing in it reads, which are mistakes."""
    try:
        return load("run.toml", options)
    except ConfigError as error:
        idle = [one.key for one in error.problems if "read it" in one.problem or "reads it" in one.problem]
        unread = {key.replace("[", "").replace("] ", ".") for key in idle}
        return load("run.toml", [option for option in options if option.split("=")[0] not in unread])


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("drawn")
    (path / "by_chance.py").write_text(CHANCE)
    answers = [{"prompt": f"{n}+1?\n", "completion": f"so {n + 1}"} for n in range(9)]
    (path / "expert.jsonl").write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    return path


@pytest.fixture
def train(folder, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / "run.toml").write_text('[[rewards]]\nname = "by_chance.chance"\n[expert]\npath = "expert.jsonl"\n')

    def go(index):
        loaded = drawn([*SMALL, f"logging.name=r{index}", *combination(index)])
        return loaded, run(loaded, Resume(), lambda event, details: None)

    return go


@pytest.mark.slow(but=1)
@pytest.mark.parametrize("index", range(DRAWN))
def test_a_drawn_combination_trains(train, index):
    loaded, folder = train(index)
    steps = rows(folder / "metrics.jsonl")
    assert len(steps) == 2
    assert all(isfinite(value) for step in steps for value in step.values())
    assert not any(step.get("update/nonfinite") for step in steps)
    if "expert" in loaded.objective(exact=True).sources:
        assert steps[-1]["grad/norm"] > 0  # at the first step mu may be 0


def test_the_draws_cover_the_registry_and_mostly_train(folder):
    text = "\n".join(" ".join(combination(index)) for index in range(DRAWN))
    for kind in ("advantage", "transform", "uncertainty", "filter", "reduction", "loss"):
        assert [name for name in named(kind) if f'"{name}"' not in text] == []
    done = [rows(file) for file in folder.glob("runs/*/metrics.jsonl")]
    trained = [steps for steps in done if any(step.get("grad/norm", 0) > 0 for step in steps)]
    assert len(trained) >= 0.8 * len(done)
