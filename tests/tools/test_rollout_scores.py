import json
from pathlib import Path

import pytest

from retrain.errors import DataError
from retrain.tools.rollout_scores import compare, score_file, summarize

VECTORS = json.loads((Path(__file__).parents[1] / "data" / "evaluation.json").read_text())


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


@pytest.fixture
def files(tmp_path):
    return [write(tmp_path / f"{name}.jsonl", VECTORS["evaluate"][name]) for name in ("results", "base_results")]


def test_the_worked_example(files):
    found = score_file(files[0], (1, 2, 3))
    assert [sum(r.right) for r in found] == VECTORS["evaluate"]["num_correct"]
    facts, expected = summarize(found, (1, 2, 3)), VECTORS["evaluate"]["recommended"]
    assert facts["pass@1"]["value"] == pytest.approx(expected["pass@1_first_rollout"], abs=1e-9)
    assert facts["avg@n"]["value"] == pytest.approx(expected["pass@1_unbiased_mean"], abs=1e-9)
    for k in (2, 3):
        assert facts[f"pass@{k}"]["value"] == pytest.approx(expected[f"pass@{k}"], abs=1e-9)
    assert facts["avg_tokens"]["value"] == expected["avg_tokens"]
    assert (facts["problems"], facts["rollouts"], facts["failed"]) == (3, 9, 0)


def test_aes_from_the_first_rollout_and_from_all(files):
    facts = compare(score_file(files[0]), score_file(files[1]))
    assert facts["aes_avg"]["value"] == pytest.approx(VECTORS["evaluate"]["seed_evaluate.py_AES_k1"], abs=1e-9)
    assert facts["aes"]["value"] == pytest.approx(0.5, abs=1e-9)  # the first rollouts are equally often right
    assert facts["aes_avg"]["length_part"] == 0.5
    assert facts["paired"]["avg_tokens"]["value"] == -50.0
    assert (facts["pairs"], facts["unpaired"]) == (3, 0)


@pytest.mark.parametrize("case", VECTORS["math_equivalence"])
def test_the_normal_form_decides_as_published(tmp_path, case):
    row = {"predictions": case["pred"], "lengths": 3, "answer": case["gt"]}
    (found,) = score_file(write(tmp_path / "r.jsonl", [row]))
    assert found.right == (case["expected"],)


def test_symbolic_takes_what_is_mathematically_equal(tmp_path):
    rows = [
        {
            "predictions": ["3/4", "so\n#### \\frac{3}{4}", "\\boxed{0.75}", "0.7"],
            "lengths": [1, 2, 3, 4],
            "answer": "0.75",
        }
    ]
    path = write(tmp_path / "r.jsonl", rows)
    symbolic = score_file(path, equivalence="symbolic")
    assert symbolic[0].right == (True, True, True, False)
    assert score_file(path)[0].right == (False, False, True, False)


def test_recorded_verdicts_count_unless_answers_are_to_be_compared(tmp_path):
    rows = [
        {"predictions": ["5 + 3 = 8", "9"], "lengths": [4, 1], "answer": "8", "correct": [True, False]},
        {"predictions": "7", "lengths": 1, "answer": "7"},
    ]
    path = write(tmp_path / "r.jsonl", rows)
    assert [one.right for one in score_file(path)] == [(True, False), (True,)]
    assert [one.right for one in score_file(path, equivalence="simple")] == [(False, False), (True,)]


def test_n_may_differ_by_row(tmp_path):
    rows = [
        {"predictions": ["1", "2"], "lengths": [10, 20], "answer": 1},
        {"predictions": "7", "lengths": 60, "answer": "7"},
    ]
    facts = summarize(score_file(write(tmp_path / "r.jsonl", rows)))
    assert facts["avg@n"]["value"] == 0.75  # problems count the same
    assert facts["avg_tokens"]["value"] == 30.0  # rollouts count the same
    assert facts["pass@1"]["value"] == 1.0


def test_k_above_n_names_every_row_that_has_too_few(tmp_path):
    rows = [{"predictions": ["1"] * n, "lengths": [1] * n, "answer": "1"} for n in (2, 4, 3)]
    path = write(tmp_path / "r.jsonl", rows)
    with pytest.raises(DataError, match=f"^{path}:1: pass@4 needs 4 predictions, there are 2\n") as caught:
        score_file(path, (1, 4))
    lines = str(caught.value).splitlines()
    assert lines[1].startswith(f"{path}:3:")
    assert "smaller k" in lines[2]


BAD = {
    '{"predictions": ["1"], "lengths": [1]}': 'no field "ground_truth" or "answer"',
    '{"predictions": ["1", "2"], "lengths": [1], "answer": "1"}': "1 lengths for 2 predictions",
    '{"predictions": ["1"], "lengths": [true], "answer": "1"}': "lengths[0]: expected an integer, got bool",
    '{"predictions": ["1", "2"], "lengths": [1, 1], "answer": "1", "correct": [true]}': "1 correct for 2 predictions",
    "{": "not JSON",
}


def test_one_length_holds_for_every_prediction(tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"predictions": ["1", "2"], "lengths": 7, "answer": "1"}\n')
    assert score_file(str(file))[0].lengths == (7, 7)


def test_all_malformed_rows_are_told_with_their_lines(tmp_path):
    path = tmp_path / "r.jsonl"
    path.write_text("\n".join(BAD))
    with pytest.raises(DataError, match=f"^{path}:1: ") as caught:
        score_file(str(path))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(BAD) + 1
    for number, (line, problem) in enumerate(zip(lines, BAD.values(), strict=False), start=1):
        assert line.startswith(f"{path}:{number}: ")
        assert problem in line


def paired(tmp_path, ours, theirs):
    return [score_file(write(tmp_path / f"{name}.jsonl", rows)) for name, rows in (("ours", ours), ("theirs", theirs))]


def row(answer, prediction, **ids):
    return {"predictions": [prediction], "lengths": [5], "answer": answer, **ids}


def test_problems_are_paired_by_id_whatever_their_order(tmp_path):
    ours = [row("1", "1", id="a"), row("2", "2", id="b"), row("3", "3", id="c")]
    theirs = [row("2", "0", id="b"), row("1", "1", id="a"), row("9", "9", id="z")]
    facts = compare(*paired(tmp_path, ours, theirs))
    assert (facts["pairs"], facts["unpaired"]) == (2, 2)
    assert facts["paired"]["pass@1"]["value"] == 0.5


@pytest.mark.parametrize(
    ("ours", "theirs", "problem"),
    [
        ([row("1", "1")], [row("2", "2")], "different problems"),
        ([row("1", "1", id="a")], [row("1", "1", id="b")], "no problem in common"),
        ([row("1", "1", id="a")] * 2, [row("1", "1", id="a")], "is taken by"),
    ],
)
def test_problems_that_cannot_be_paired_are_refused(tmp_path, ours, theirs, problem):
    with pytest.raises(DataError, match=problem):
        compare(*paired(tmp_path, ours, theirs))
