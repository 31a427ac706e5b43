"""The examples of docs/from-python.md run as they stand there, in this process, with fewer steps."""

import asyncio
import random
import re
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import retrain
from retrain.errors import ConfigError
from retrain.registry.component import REGISTERED

PAGE = (Path(__file__).parents[2] / "docs" / "from-python.md").read_text()
TRAIN, CAMPAIGN = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
TINY = {"batch_size": 2, "group_size": 4, "max_tokens": 8}
QUICK = {"training": TINY | {"max_steps": 1}, "warmup": {"steps": 0}, "eval": {"problems": 0}}
SMALL = {
    '"max_steps": 60, "batch_size": 16, "group_size": 8': '"max_steps": 2, "batch_size": 2, "group_size": 4',
    '"steps": 150, "warmup_steps": 15': '"steps": 10, "warmup_steps": 1, "batch_size": 8, "problems": 96',
    '"every": 20, "problems": 64': '"every": 1, "problems": 4',
    'training={"max_steps": 60}': f'training={TINY | {"max_steps": 1}}, warmup={{"steps": 0}}, eval={{"problems": 4}}',
    "seeds = 4": "seeds = 2",
}
"""Settings of the page, and those of the test."""


def run_small(code) -> dict[str, Any]:
    """Run an example, and return its variables."""
    for long, short in SMALL.items():
        code = code.replace(long, short)
    assert len({key for key in SMALL if key in PAGE}) == len(SMALL)
    names: dict[str, Any] = {"__name__": "example"}
    exec(code, names)
    return names


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(cwd):
    yield
    REGISTERED.pop(("advantage", "halves"), None)


def test_the_example_trains_and_reads_its_run(capsys):
    names = run_small(TRAIN)
    run, printed = names["run"], capsys.readouterr().out
    assert run.path == Path("runs/halves")
    assert [row["step"] for row in run.metrics()] == [0, 1]
    assert [row["step"] for row in run.evaluations()] == [0, 1, 2]
    assert {row["step"] for row in run.samples()} <= {0, 1}
    assert all(row["text"] in printed for row in run.samples()[:3])
    with pytest.raises(ConfigError, match="holds a finished run"):
        retrain.train(names["settings"], logging={"name": "halves"})


def numbers():
    return random.random(), float(np.random.rand()), torch.rand(1, device="cpu", dtype=torch.float32).item()


def trained(name="plain", **tables):
    run = retrain.train({}, plain=True, logging={"name": name}, **{**QUICK, **tables})
    return [{key: value for key, value in row.items() if not key.startswith("time/")} for row in run.metrics()]


def modes():
    return torch.is_grad_enabled(), torch.get_default_dtype(), torch.get_default_device(), torch.get_num_threads()


@contextmanager
def changed_modes():
    """All the modes in which a program may call torch, at once."""
    torch.set_default_dtype(torch.float64)
    with torch.device("meta"), torch.autocast("cpu", torch.bfloat16), torch.no_grad(), torch.inference_mode():
        yield
    torch.set_default_dtype(torch.float32)


def seed():
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)


def test_a_run_neither_sees_nor_changes_the_thread_modes_and_numbers_of_its_caller():
    async def in_thread():
        return await asyncio.to_thread(trained, "thread")

    seed()
    expected, in_a_thread = numbers(), asyncio.run(in_thread())
    with changed_modes():
        before = modes()
        seed()
        assert trained() == in_a_thread
        assert (numbers(), modes()) == (expected, before)


@pytest.mark.slow
def test_the_campaign_has_a_verdict_and_its_runs(capsys):
    campaign = run_small(CAMPAIGN)["campaign"]
    [row] = campaign.verdicts
    assert (row["condition"], row["seeds"], campaign.failed) == ("maxrl", [0, 1], False)
    assert row["sentence"] in capsys.readouterr().out
    assert [len(run.metrics()) for run in campaign.runs()] == [1] * 4
    assert (campaign.path / "report.html").exists()


@pytest.mark.parametrize(
    ("source", "tables", "text"),
    [
        ({"training": {"max_stpes": 3}}, {}, 'dict:2:1: [training] max_stpes: unknown key; did you mean "max_steps"?'),
        ({"training": {"max_steps": None}}, {}, "dict: file: not valid TOML: "),
        ({}, {"optimizer": {"lr": "x"}}, '--set optimizer.lr="x": [optimizer] lr: must be a number'),
        ({}, {"optimizer": {"lr": None}}, "overrides: optimizer.lr: TOML has no None"),
        ({}, {"rewards": [{"name": "exakt"}]}, '[[rewards]] name: no reward named "exakt"; did you mean "exact"?'),
        ("missing.toml", {}, "missing.toml: file: No such file or directory"),
    ],
)
def test_errors_are_exceptions_with_the_text_of_the_command(source, tables, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        retrain.train(source, **tables)


def test_a_run_without_a_model_says_how_to_get_one(tmp_path):
    with pytest.raises(ConfigError, match="has no final model; retrain export"):
        retrain.Run(tmp_path).model()
