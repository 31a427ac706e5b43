"""Tasks from files: every kind of bad row, splits, order, fingerprints."""

import json
import re

import pytest

from retrain.data.rows import Jsonl, Parquet
from retrain.errors import DataError
from retrain.registry import find


def write(path, rows):
    path.write_bytes(b"".join(row if isinstance(row, bytes) else json.dumps(row).encode() + b"\n" for row in rows))
    return str(path)


def good(count, start=0):
    return [{"prompt": f"q{i}", "answer": f"a{i}", "level": i} for i in range(start, start + count)]


def failure(path, **params):
    with pytest.raises(DataError, match=re.escape(str(path))) as caught:
        Jsonl(0, path=path, **params)
    assert caught.value.exit_code == 3
    return str(caught.value)


BAD = {
    b"{not json\n": "not JSON: key must be a string at column 2",
    b"[1, 2]\n": "expected an object with named fields, got list",
    b'{"prompt": "q"}\n': 'no field "answer"; it has prompt',
    b'{"answer": "a", "text": "q"}\n': 'no field "prompt"; it has answer, text',
    b'{"prompt": 3, "answer": "a"}\n': "prompt: expected text, got int",
    b'{"prompt": "q", "answer": null}\n': "answer: expected text, got NoneType",
    b'{"prompt": " ", "answer": "a"}\n': "prompt: empty",
    b'{"prompt": [], "answer": "a"}\n': "messages must end with a message to answer",
    b'{"prompt": [{"role": "robot", "content": "q"}], "answer": "a"}\n': "prompt[0].role: Input should be",
    b'{"prompt": "q", "answer": "a", "answer": "b"}\n': 'two fields are called "answer"',
    b'{"prompt": "q", "answer": "a", "x": NaN}\n': "not JSON: expected value at column 37",
    b'{"prompt": "caf\xe9", "answer": "a"}\n': "not UTF-8: byte 0xe9 at column 16; save the file as UTF-8",
    b'{"prompt": "' + b"x" * 1_048_576 + b'", "answer": "a"}\n': "the line is longer than 1,000,000 bytes",
    b"[" * 100_000 + b"\n": "not JSON",
}


def test_a_row_may_quote_the_name_of_a_field(tmp_path):
    row = b'{"prompt": "is {\\"answer\\": 1} JSON?", "answer": "a", "x": {"answer": "b"}}\n'
    assert len(Jsonl(0, path=str(write(tmp_path / "data.jsonl", [row] * 3)), heldout_fraction=0.0).train) == 3


@pytest.mark.parametrize(("line", "reason"), BAD.items(), ids=list(range(len(BAD))))
def test_a_bad_row_is_named_with_its_line(tmp_path, line, reason):
    path = write(tmp_path / "data.jsonl", [*good(2), b"\n", line, *good(2, 5)])
    message = failure(path)
    assert message.startswith(f"{path}:4: ")
    assert reason in message
    assert 'on_bad_row = "skip"' in message


def test_all_bad_rows_are_reported_together_up_to_twenty(tmp_path):
    path = write(tmp_path / "data.jsonl", [*good(3), *(b'{"k%d": 1}\n' % n for n in range(25)), *[b"oops\n"] * 2])
    lines = failure(path).splitlines()
    assert lines[0].startswith(f'{path}:4: no field "prompt"; it has k0')
    assert lines[19].startswith(f'{path}:23: no field "prompt"; it has k19')
    assert lines[20] == "... and 6 more"
    assert lines[21].startswith(f"{path}: 27 bad rows: fix them")


def test_duplicate_ids_name_both_places(tmp_path):
    rows = [{"id": 7, "prompt": "q", "answer": "a"}, {"id": "7", "prompt": "r", "answer": "a"}]
    path = write(tmp_path / "data.jsonl", rows)
    assert f'{path}:2: id "7" is taken by {path}:1' in failure(path)


def test_a_file_that_is_empty_or_cannot_be_read(tmp_path):
    for content in (b"", b"\n\n \n"):
        assert "no rows" in failure(write(tmp_path / "data.jsonl", [content]))
    for name in ("missing.jsonl", "."):
        assert "cannot be read" in failure(str(tmp_path / name))


def test_skipping_counts_and_has_a_ceiling(tmp_path, caplog):
    path = write(tmp_path / "data.jsonl", [*good(99), b"oops\n"])
    task = Jsonl(0, path=path, on_bad_row="skip", heldout_fraction=0.0)
    assert len({task.problem(i).id for i in range(99)}) == 99
    assert "1 of 100 rows skipped, the first: " in caplog.text
    path = write(tmp_path / "data.jsonl", [*good(98), b"oops\n", b"oops\n"])
    assert "more than max_bad_fraction = 0.01 of 100 rows" in failure(path, on_bad_row="skip")
    path = write(tmp_path / "data.jsonl", [b"oops\n"])
    assert "1 bad row: more than" in failure(path, on_bad_row="skip", max_bad_fraction=0.99)


@pytest.mark.parametrize(("field", "said"), [("answer", True), ("", False)])
def test_empty_answers_are_counted(tmp_path, caplog, field, said):
    """A reward that looks for the answer in the completion pays each completion of such a row."""
    path = write(tmp_path / "data.jsonl", [*good(2), {"prompt": "q", "answer": " "}])
    Jsonl(0, path=path, answer_field=field, heldout_fraction=0.0)
    assert ("1 of 3 answers are empty, the first in row 3" in caplog.text) == said


def test_rows_become_problems(tmp_path):
    messages = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "q"}]
    rows = [
        b'\xef\xbb\xbf{"prompt": "first", "answer": "a"}\n',
        {"prompt": messages, "answer": "b", "solution": "s", "id": 3, "level": 2},
        b'{"prompt": "no newline", "answer": ""}',
    ]
    path = write(tmp_path / "data.jsonl", rows)
    task = Jsonl(0, path=path, heldout_fraction=0.0, shuffle=False)
    first, second, third, wrapped = (task.problem(i) for i in range(4))
    assert (first.id, first.prompt, first.solution) == (f"{path}:1", "first", None)
    assert (second.id, second.prompt, second.solution, second.extra) == (
        "3",
        messages,
        "s",
        {k: v for k, v in rows[1].items() if k != "prompt"},
    )
    assert (third.prompt, third.answer) == ("no newline", "")
    assert wrapped == first
    assert task.heldout(5) == []


def test_other_field_names(tmp_path):
    path = write(tmp_path / "data.jsonl", [{"question": "q", "final": "a", "cot": "s", "uid": "u"}])
    fields = {"prompt_field": "question", "answer_field": "final", "solution_field": "cot", "id_field": "uid"}
    problem = (
        find("task", "jsonl").bind({"path": path, "heldout_fraction": 0.0, **fields}).build({"seed": 1}).problem(0)
    )
    assert (problem.id, problem.prompt, problem.answer, problem.solution) == ("u", "q", "a", "s")


def test_epochs_are_permutations_that_differ_and_depend_on_the_seed(tmp_path):
    path = write(tmp_path / "data.jsonl", good(50))

    def epoch(seed, number):
        task = Jsonl(seed, path=path, heldout_fraction=0.0)
        return [task.problem(number * 50 + i).prompt for i in range(50)]

    assert sorted(epoch(0, 0)) == sorted(epoch(0, 1)) == sorted(f"q{i}" for i in range(50))
    assert epoch(0, 0) == epoch(0, 0)
    assert epoch(0, 0) != epoch(0, 1)
    assert epoch(0, 0) != epoch(1, 0)


def test_the_split_ignores_the_seed_and_keeps_equal_prompts_together(tmp_path):
    path = write(tmp_path / "data.jsonl", good(300) + good(300))
    one, two = Jsonl(0, path=path), Jsonl(1, path=path)
    held = one.heldout(1000)
    assert held == two.heldout(1000)
    assert held[:7] == one.heldout(7)
    assert 30 < len(held) < 90
    train = {one.problem(i).prompt for i in range(600 - len(held))}
    assert train.isdisjoint({p.prompt for p in held})
    assert len(train) == 300 - len(held) // 2


def test_a_held_out_file_keeps_its_prompts_out_of_training(tmp_path):
    held = write(tmp_path / "held.jsonl", good(4))
    train = write(tmp_path / "train.jsonl", good(8, 4))
    task = Jsonl(0, path=train, heldout_path=held)
    assert {p.prompt for p in task.heldout(9)} == {"q0", "q1", "q2", "q3"}
    mixed = write(tmp_path / "mixed.jsonl", good(8, 3))
    assert f"{mixed}:1: this prompt is held out" in failure(mixed, heldout_path=held)
    task = Jsonl(0, path=mixed, heldout_path=held, on_bad_row="skip", max_bad_fraction=0.5)
    assert {task.problem(i).prompt for i in range(7)} == {f"q{i}" for i in range(4, 11)}


def test_fingerprint_follows_content_and_settings(tmp_path):
    path = write(tmp_path / "data.jsonl", good(50))
    before = Jsonl(0, path=path).fingerprint()
    assert Jsonl(1, path=path).fingerprint() == before
    assert Jsonl(0, path=path, shuffle=False).fingerprint() != before
    assert Jsonl(0, path=path, heldout_fraction=0.2).fingerprint() != before
    held = write(tmp_path / "held.jsonl", good(4, 90))
    assert Jsonl(0, path=path, heldout_path=held).fingerprint() != before
    write(tmp_path / "data.jsonl", good(51))
    assert Jsonl(0, path=path).fingerprint() != before


def parquet_file(path, columns):
    import pyarrow as arrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(arrow.table(columns), path)
    return str(path)


def test_parquet_rows(tmp_path):
    messages = [[{"role": "user", "content": f"q{i}"}] for i in range(30)]
    columns = {"prompt": messages, "answer": [f"a{i}" for i in range(30)], "level": list(range(30))}
    path = parquet_file(tmp_path / "data.parquet", columns)
    task = Parquet(0, path=path, heldout_fraction=0.2)
    problems = [task.problem(i) for i in range(30 - len(task.heldout(30)))] + task.heldout(30)
    assert sorted(p.extra["level"] for p in problems) == list(range(30))
    level = problems[0].extra["level"]
    assert problems[0].id == f"{path}:{level + 1}"
    assert problems[0].prompt == messages[level]


def test_parquet_bad_rows_have_their_number(tmp_path):
    path = parquet_file(tmp_path / "data.parquet", {"prompt": ["q", None, "r"], "answer": ["a", "b", "c"]})
    with pytest.raises(DataError, match=r"data.parquet:2: prompt: expected text, got NoneType"):
        Parquet(0, path=path)
