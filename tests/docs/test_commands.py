"""The command line reads every line of a shell block of the documentation, and what takes seconds here is run.

The commands run in one folder, which has the files and runs that the pages speak of, in small. No command needs what
another leaves there.
"""

import json
import re
import shlex
import shutil
from contextlib import chdir
from typing import Any

import pytest
from typer.main import get_command

from retrain.cli.main import app
from retrain.config.load import load
from retrain.run.session import Resume, run
from tests.campaign.tables import write_campaign
from tests.commands import invoke
from tests.docs.test_snippets import ROOT, blocks
from tests.small_runs import TOML

pytestmark = pytest.mark.repository

OTHERS = {"make", "pip", "source", "export", "ray", "sbatch", "python", "scp", "rm"}
"""First words of lines that are for other programs."""
READ = (
    (r"serve|train .*--ranks", "needs GPUs"),
    (r"train (configs|plugins)/", "the tests of recipes and plug-ins train them"),
    (r"worker|audit|prm score", "minutes, or a server, or a PRM: the tests of these commands run them"),
    (r"score aime", "tests/cli/test_run_commands.py scores what `eval --out` wrote"),
    (r"credit groups", "tests/docs/test_snippets.py runs it"),
    (r"compare (?!runs/)", "tests/docs/test_compare.py runs it"),
    (r"(data prepare|grams extract) .*--source (hub|config)", "the hub"),
    (r"train .*(minimal|server)_engine", "tests/docs/test_minimal_engine.py trains with it"),
)
"""Commands that are read only, and why."""
READ_ONLY = re.compile("|".join(what for what, _ in READ))
CHANGED = (
    (r"train run.toml$", "--fresh"),
    (r"train run.toml --set", "--fresh"),
    (
        r"train my_",
        "--fresh --set training.max_steps=1 --set warmup.steps=2 --set warmup.warmup_steps=1 --set eval.problems=2",
    ),
    (r"(campaign|testbed) (?!.*--(dry-run|slurm))", "--dry-run"),
    (r"campaign (?!.*--slurm)", "--no-probe"),
    (r"init", "--force"),
    (r"eval", "--set eval.problems=2"),
    (r"campaign campaigns/", "--set campaign.name=mine"),
    (r"verify", "--trials 2"),
    (r"data prepare", "--force"),
    (r"data prepare .*jsonl", "--val-size 2"),
)
"""What is added to commands so that they take seconds, and can be given twice."""
SOLVED = [{"prompt": f"{n}+1=", "solution": "let me check: so 2", "answer": "2", "correct": n < 3} for n in range(6)]
FILES = {
    "solutions": SOLVED,
    "problems": SOLVED,
    "dca": [{"id": n, "predictions": ["so 2"] * 3, "lengths": [3, 4, 5], "answer": "2"} for n in range(4)],
    "vanilla": [{"id": n, "predictions": ["so 3"] * 3, "lengths": [9, 9, 9], "answer": "2"} for n in range(4)],
}


def lines():
    """The lines of all shell blocks, continued ones joined, comments and empty ones left out, each once."""
    text = "\n".join(str(param.values[0]) for param in blocks("sh", "bash")).replace("\\\n", " ")
    found = [shlex.split(line, comments=True) for line in text.splitlines()]
    return {" ".join(words): words for words in found if words}


def ours():
    """What follows `retrain` in the lines that call it, up to where their output goes."""
    for line, words in lines().items():
        called = [word for word in words if not re.match(r"[A-Z_]+=", word)]
        if called[:1] == ["retrain"]:
            end = next((called.index(sign) for sign in (">", "&") if sign in called), None)
            yield pytest.param(called[1:end], id=line)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("reader")
    for name in ("configs", "campaigns", "plugins"):
        (place / name).symlink_to(ROOT / name)
    small = TOML + '[algorithm]\ntransform_mode = "hicra"\n'
    for name, text in (("run", small), ("mine", small), ("lora", small), ("dapo", TOML)):
        (place / f"{name}.toml").write_text(text.replace("max_steps = 4", "max_steps = 2"))
    for name in ("dca", "sweep"):
        conditions = (
            '[[campaign.conditions]]\nadvantage_mode = "grpo"\n[[campaign.conditions]]\nadvantage_mode = "dca"\n'
        )
        (place / f"{name}.toml").write_text(f'[campaign]\nbase = "run.toml"\nseeds = 6\n{conditions}')
    for name, rows in FILES.items():
        (place / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (place / "grams.json").write_text('["let me check"]')
    with chdir(place):
        run(load(place / "run.toml", [f'logging.dir="{place}/runs"']), Resume(), lambda event, details: None)
        for name in ("quickstart", "NAME"):
            shutil.copytree(place / "runs" / "run", place / "runs" / name)
    for name in ("quickstart-campaign", "dca", "ablation"):
        write_campaign(place / "runs" / name, conditions=("grpo", "maxrl"), seeds=range(2), steps=20, failed=())
    return place


def test_every_line_is_ours_or_of_a_program_that_is_known():
    first = {words[0] for words in lines().values() if "retrain" not in words[:2]}
    assert first <= OTHERS
    makefile = (ROOT / "Makefile").read_text()
    targets = [words[1] for words in lines().values() if words[0] == "make"]
    assert targets
    assert [one for one in targets if not re.search(rf"^{one}:", makefile, re.MULTILINE)] == []


@pytest.mark.parametrize("words", ours())
def test_the_command_line_reads_it(words):
    group: Any = get_command(app)
    with group.make_context("retrain", [*words], resilient_parsing=False) as outer:
        name, command, rest = group.resolve_command(outer, [*words])
        while hasattr(command, "commands"):
            outer = command.make_context(name, [*rest], parent=outer)
            name, command, rest = command.resolve_command(outer, [*rest])
        command.make_context(name, [*rest], parent=outer)


@pytest.mark.parametrize("words", [one for one in ours() if not READ_ONLY.match(str(one.id).partition("retrain ")[2])])
def test_it_runs(words, folder, monkeypatch):
    monkeypatch.chdir(folder)
    line = " ".join(words)
    added = [word for what, more in CHANGED if re.match(what, line) for word in more.split()]
    step = re.compile(r"step-\d+")
    words = [step.sub("step-000002" if "rollouts" not in word else "step-000000", word) for word in words]
    words = ["new.toml" if words[0] == "init" and word == "run.toml" else word for word in words if word != "--watch"]
    invoke(*words, *added, code=0)


def test_what_is_only_read_is_in_the_documentation():
    every = [str(param.id).partition("retrain ")[2] for param in ours()]
    assert [what for what, _ in READ if not any(re.match(what, line) for line in every)] == []
