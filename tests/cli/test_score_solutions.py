"""`retrain prm score` on the process reward model of a small run."""

import json

import pytest

PRIME = """
[algorithm]
transform_mode = ["process_rloo", "whiten"]

[prime]
beta = 0.5
lr = 1e-3
"""
SOLUTIONS = [
    {"prompt": "12+34?\n", "solution": "so 46", "correct": True},
    {"prompt": "12+34?\n", "completion": "so 4", "reward": 0.0},
    {"prompt": "12+34?\n", "text": "so 47", "correct": False, "id": "x"},
    {"prompt": "1+1?\n", "solution": "so 2", "id": "x"},
]


@pytest.fixture
def prm(folder, cli):
    """The model of a finished run, from the user's folder."""
    (folder / "run.toml").write_text((folder / "run.toml").read_text() + PRIME)
    cli("train", "run.toml", "--plain", "--set", "training.max_steps=2", "--set", "eval.problems=0", code=0)
    return "runs/run/model/process_rewards"


def write(folder, rows):
    (folder / "solutions.jsonl").write_text(
        "".join(f"{row if isinstance(row, str) else json.dumps(row)}\n" for row in rows)
    )


@pytest.mark.slow
def test_solutions_are_scored_by_row_and_by_token(folder, cli, prm):
    write(folder, SOLUTIONS)
    result = cli("prm", "score", prm, "solutions.jsonl", "--json", "--tokens", "--out", "scores.jsonl", code=0)
    found = json.loads(result.stdout)
    rows = found["rows"]
    assert [json.loads(line) for line in (folder / "scores.jsonl").read_text().splitlines()] == rows
    assert [row["line"] for row in rows] == [1, 2, 3, 4]
    assert [row.get("correct") for row in rows] == [True, False, False, None]
    for row, solution in zip(rows, SOLUTIONS, strict=True):
        text = next(solution[name] for name in ("solution", "completion", "text") if name in solution)
        assert "".join(token for token, _ in row["tokens"]).startswith(text)
        assert row["length"] == len(row["tokens"]), "end of sequence included"
        assert row["r_phi"] == pytest.approx(sum(value for _, value in row["tokens"]))
        assert row["mean"] == pytest.approx(row["r_phi"] / row["length"])
        assert row["r_phi"] != 0
    won = [(rows[0]["r_phi"] > row["r_phi"]) + 0.5 * (rows[0]["r_phi"] == row["r_phi"]) for row in rows[1:3]]
    assert found["summary"]["accuracy"] == pytest.approx(sum(won) / 2)
    assert found["summary"]["rows"] == 4


@pytest.mark.slow
def test_the_table_beta_and_reference(folder, cli, prm):
    write(folder, SOLUTIONS[3:])
    plain = cli("prm", "score", prm, "solutions.jsonl", "--tokens", code=0)
    assert plain.stdout.startswith("line 1  r_phi ")
    assert "accuracy" not in plain.stdout

    def score(*options):
        return json.loads(cli("prm", "score", prm, "solutions.jsonl", "--json", *options).stdout)["rows"][0]["r_phi"]

    assert score("--beta", "1.0") == pytest.approx(2 * score())
    assert score("--reference", prm) == 0.0
    assert "r_phi" not in cli("prm", "score", prm, "solutions.jsonl", "--out", "scores.jsonl").stdout.split("rows")[0]


@pytest.mark.slow
def test_bad_rows_are_named_by_file_and_line(folder, cli, prm):
    bad = ["{", [], {"prompt": "1?"}, {"prompt": 3, "text": "x"}, {"prompt": "1?", "text": "x", "correct": "yes"}]
    bad += [{"messages": [{"role": "user", "content": "1?"}]}, {"prompt": "1?", "text": "1 2 " * 4000}]
    write(folder, [SOLUTIONS[0], *bad[:-1]])
    result = cli("prm", "score", prm, "solutions.jsonl", code=3)
    for line, reason in enumerate(("not JSON", "an object", "no field solution", "expected text", "correct"), 2):
        assert any(
            text.startswith(f"solutions.jsonl:{line}: ") and reason in text for text in result.stderr.splitlines()
        )
    assert "solutions.jsonl:7: messages must end" in result.stderr
    assert "6 bad rows: fix or remove them" in result.stderr
    assert "on_bad_row" not in result.stderr, "the command has no such key"
    write(folder, [bad[-1]])
    long = cli("prm", "score", prm, "solutions.jsonl", code=3)
    assert "solutions.jsonl:1: " in long.stderr
    assert "the model takes" in long.stderr
    roles = ("system", "user", "assistant")
    write(folder, [{"messages": [{"role": role, "content": "1?"} for role in roles]}])
    chat = cli("prm", "score", prm, "solutions.jsonl", code=3)
    assert "chat template" in chat.stderr


@pytest.mark.parametrize("beta", ["nan", "inf", "-1", "0"])
def test_a_scale_is_a_finite_number_above_0(folder, cli, beta):
    result = cli("prm", "score", "model", "solutions.jsonl", "--beta", beta, code=2)
    assert "finite number above 0" in result.stderr
