"""Expert data: what a row may be, what is refused with its line, and the order of the buffer."""

import json
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.data.expert_file import ExpertBuffer, fingerprint, read_experts
from retrain.errors import DataError

USER = {"role": "user", "content": "1+1?"}
SAID = {"role": "assistant", "content": "so 2"}


def written(tmp_path, *rows, name="expert.jsonl"):
    file = tmp_path / name
    file.write_text("".join((row if isinstance(row, str) else json.dumps(row)) + "\n" for row in rows))
    return str(file)


def test_messages_and_prompts_are_read_with_their_place(tmp_path):
    path = written(
        tmp_path,
        {"messages": [{"role": "system", "content": "add"}, USER, SAID], "source": "a larger model"},
        "",
        {"prompt": "2+2?", "completion": "so 4"},
        {"prompt": [USER, SAID, USER], "completion": "so 2, again"},
    )
    first, second, third = read_experts(path)
    assert (first.prompt, first.solution) == ([{"role": "system", "content": "add"}, USER], "so 2")
    assert (second.prompt, second.solution) == ("2+2?", "so 4")
    assert (third.prompt, third.solution) == ([USER, SAID, USER], "so 2, again")
    assert [one.id for one in (first, second, third)] == [f"{path}:{line}" for line in (1, 3, 4)]


@pytest.mark.parametrize(
    ("row", "why"),
    [
        ('{"messages": [', "not JSON"),
        ({"text": "hello"}, 'no field "messages", and not "prompt" and "completion"; it has text'),
        ({"messages": [SAID, USER]}, "the last message must be the assistant's"),
        ({"messages": [SAID]}, "there is no prompt"),
        ({"messages": [USER, {"role": "assistant", "content": " "}]}, "the expert's answer is empty"),
        ({"prompt": "1+1?", "completion": 2}, "completion: expected text, got int"),
    ],
)
def test_a_bad_row_is_named_with_its_line(tmp_path, row, why):
    path = written(tmp_path, {"messages": [USER, SAID]}, row)
    with pytest.raises(DataError, match=f"^{re.escape(str(path))}:2: .*{re.escape(why)}") as caught:
        read_experts(path)
    assert caught.value.exit_code == 3


def test_parquet(tmp_path):
    import pyarrow as arrow
    from pyarrow import parquet

    rows = [{"messages": [USER, SAID]}, {"messages": [USER]}]
    parquet.write_table(arrow.Table.from_pylist(rows[:1]), tmp_path / "good.parquet")
    parquet.write_table(arrow.Table.from_pylist(rows), tmp_path / "bad.parquet")
    assert read_experts(str(tmp_path / "good.parquet"))[0].prompt == [USER]
    with pytest.raises(DataError, match=r"bad\.parquet:2: messages: the last message"):
        read_experts(str(tmp_path / "bad.parquet"))


def test_the_fingerprint_is_of_what_is_said_and_in_which_order(tmp_path):
    one, two = {"prompt": "a", "completion": "b"}, {"prompt": "c", "completion": "d"}
    read = [read_experts(written(tmp_path, *rows, name=name)) for name, rows in (("1", (one, two)), ("2", (two, one)))]
    again = read_experts(written(tmp_path, one | {"note": "ignored"}, two, name="3"))
    assert fingerprint(read[0]) == fingerprint(again) != fingerprint(read[1])


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(0, 30), max_size=8), st.integers(0, 3))
def test_every_pass_gives_every_row_once_whatever_the_portions(size, portions, seed):
    buffer = ExpertBuffer(range(size), seed)
    taken = [row for count in portions for row in buffer.take(count)]
    assert len(taken) == sum(portions)
    passes = [taken[start : start + size] for start in range(0, len(taken), size)]
    assert all(sorted(one) == list(range(size)) for one in passes if len(one) == size)
    assert (buffer.epoch, buffer.offset) == divmod(len(taken), size)


@settings(deadline=None)
@given(st.integers(1, 12), st.lists(st.integers(1, 9), min_size=1, max_size=6), st.data())
def test_it_goes_on_where_a_checkpoint_left_it(size, portions, data):
    cut = data.draw(st.integers(0, len(portions)))
    whole, first, second = (ExpertBuffer(range(size), 5) for _ in range(3))
    expected = [whole.take(count) for count in portions]
    found = [first.take(count) for count in portions[:cut]]
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert found + [second.take(count) for count in portions[cut:]] == expected


def test_the_order_depends_on_the_seed_and_on_the_pass():
    buffer, other = ExpertBuffer(range(50), 0), ExpertBuffer(range(50), 1)
    first, second = buffer.take(50), buffer.take(50)
    assert len({tuple(first), tuple(second), tuple(other.take(50)), tuple(range(50))}) == 4


def test_wanted_rows_come_first_one_of_each_prompt_in_turn():
    rows = ["a1", "b1", "a2", "c1", "a3"]
    buffer = ExpertBuffer(rows, 0, [row[0] for row in rows])
    assert buffer.take(3, ["a", "x", "b", "a"]) == ["a1", "b1", "a2"]
    assert (buffer.epoch, buffer.offset) == (0, 0), "what was asked for does not use the order up"
    plain = ExpertBuffer(rows, 0)
    assert buffer.take(4, ["c"]) == ["c1", *plain.take(3)]
    assert buffer.offset == 3
    assert buffer.take(2, ["a"]) == ["a1", "a2"]
