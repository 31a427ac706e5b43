"""A task's worked solutions become expert data that a run reads."""

import json

import pytest

from retrain.config.load import load
from retrain.data.addition import pair_is_heldout
from retrain.data.expert_file import read_experts
from retrain.errors import DataError
from retrain.tools.worked_solutions import export_solutions


@pytest.fixture
def export(toml, tmp_path):
    def go(count, *overrides, seed=3, form="messages", correct_only=False, file=tmp_path / "new" / "expert.jsonl"):
        loaded = load(toml, overrides)
        done = export_solutions(loaded, file, count, seed=seed, form=form, correct_only=correct_only)
        return done, read_experts(str(file))

    return go


def right(problem):
    prompt = problem.prompt if isinstance(problem.prompt, str) else problem.prompt[0]["content"]
    a, b = map(int, prompt.removesuffix("?\n").split("+"))
    assert not pair_is_heldout(a, b)
    return problem.solution.rsplit("so ", 1)[1] == str(a + b)


def test_solutions_are_those_of_the_training_problems(export):
    done, rows = export(300)
    assert (done.rows, done.solutions, len(rows)) == (300, 300, 300)
    assert 0.3 < sum(map(right, rows)) / 300 < 0.8, "the demonstrator makes mistakes"
    assert export(300)[1] == rows
    assert export(300, seed=4)[1] != rows


def test_correct_only_leaves_the_mistakes_out(export):
    done, rows = export(300, correct_only=True)
    assert (done.rows, len(rows)) == (300, 300)
    assert all(map(right, rows))
    everything = export(done.solutions)[1]
    assert [row.solution for row in everything if right(row)] == [row.solution for row in rows]
    assert right(everything[-1]), "it looks no further than it has to"


def test_a_task_with_few_problems_gives_each_once(export, tmp_path):
    chat = [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1?"}]
    lines = [{"prompt": f"{n}?", "answer": str(n), "solution": f"so {n}"} for n in range(5)]
    (tmp_path / "few.jsonl").write_text(
        "".join(json.dumps(line) + "\n" for line in [*lines, {"prompt": chat, "answer": "2", "solution": "so 3"}])
    )
    options = ("task.name=jsonl", f'jsonl.path="{tmp_path}/few.jsonl"', "jsonl.heldout_fraction=0.0")
    done, rows = export(100, *options)
    assert (done.rows, done.solutions) == (6, 6)
    assert chat in [row.prompt for row in rows]
    assert export(100, *options, correct_only=True)[0].rows == 5
    (tmp_path / "few.jsonl").write_text('{"prompt": "1?", "answer": "1", "solution": "so 2"}\n')
    with pytest.raises(DataError, match="none of 1 solutions is correct"):
        export(100, *options, correct_only=True)
    (tmp_path / "few.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    with pytest.raises(DataError, match="has no worked solution"):
        export(100, *options)
