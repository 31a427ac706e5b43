import json

import pytest

from retrain.data.addition import Addition
from retrain.data.gym import Gym, GymReward
from retrain.data.rows import Jsonl, Parquet
from retrain.errors import DataError, StorageError
from retrain.tools.prepared_data import as_jsonl, as_parquet, distinct, final_answer, publish, rows, select
from retrain.types import Problem


def file_of(tmp_path, count, **extra):
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps({"prompt": f"{i}?", "answer": str(i), **extra}) + "\n" for i in range(count)))
    return str(path)


def prompts(problems):
    return [problem.prompt for problem in problems]


@pytest.mark.parametrize("seed", [0, 7])
def test_a_task_without_end_gives_the_sizes_asked_for_and_disjoint_sides(seed):
    train, val = select(Addition(seed), 40, 15)
    assert (len(train), len(val)) == (40, 15)
    pairs = [{frozenset(str(p.prompt).strip("?\n").split("+")) for p in side} for side in (train, val)]
    assert not pairs[0] & pairs[1]
    assert len(set(prompts(train))) == 40
    assert prompts(val) == prompts(select(Addition(seed + 1), 40, 15)[1])  # whatever the seed


def test_rows_without_heldout_ones_are_divided_by_hash(tmp_path):
    path = file_of(tmp_path, 60)
    train, val = select(Jsonl(3, path=path, heldout_fraction=0.0), val_size=20)
    assert sorted(prompts(train + val)) == sorted(f"{i}?" for i in range(60))
    assert len(val) == 20
    assert prompts(select(Jsonl(3, path=path, heldout_fraction=0.0), val_size=20)[0]) == prompts(train)
    other, same = select(Jsonl(4, path=path, heldout_fraction=0.0), 10, 20)
    assert prompts(same) == prompts(val)
    assert len(other) == 10
    assert prompts(other) != prompts(train)[:10]
    assert len(select(Jsonl(3, path=path, heldout_fraction=0.0))[1]) == 6  # a tenth


def test_heldout_rows_of_the_task_are_the_validation_set(tmp_path):
    task = Jsonl(0, path=file_of(tmp_path, 60), heldout_fraction=0.5)
    train, val = select(task)
    assert prompts(val) == prompts(task.held)
    assert sorted(prompts(train)) == sorted(prompts(task.train))


def test_equal_prompts_count_once(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a", "answer": "1"}\n' * 3 + '{"prompt": "b", "answer": "2"}\n')
    train, val = select(Jsonl(0, path=str(path), heldout_fraction=0.0))
    assert sorted(prompts(train + val)) == ["a", "b"]
    assert len(distinct(train * 3)) == 1


def test_a_row_serves_three_readers():
    problem = Problem("7", "1+1?", "2", solution="so 2", extra={"level": 3, "label": "mine"})
    (row,) = rows([problem], "train", "sums", "arithmetic")
    assert row["data_source"] == "sums"
    assert row["prompt"] == [{"role": "user", "content": "1+1?"}]
    assert row["reward_model"] == {"style": "rule", "ground_truth": "2"}
    assert (row["extra_info"]["split"], row["extra_info"]["index"], row["ability"]) == ("train", 0, "arithmetic")
    assert (row["label"], row["question"], row["answer"], row["solution"], row["level"]) == (
        "2",
        "1+1?",
        "2",
        "so 2",
        3,
    )


def test_messages_stay_messages():
    chat = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "1+1?"}]
    (row,) = rows([Problem("7", chat, "2")], "val", "sums", "math")
    assert (row["prompt"], row["question"]) == (chat, "1+1?")
    assert "solution" not in row


def test_final_answer_takes_what_follows_the_marks():
    found = final_answer(Problem("1", "q", "2 * 6 = 12\n#### 12"))
    assert (found.answer, found.solution) == ("12", "2 * 6 = 12")
    assert final_answer(found) == found


@pytest.mark.parametrize(("kind", "encode"), [(Jsonl, as_jsonl), (Parquet, as_parquet)])
@pytest.mark.parametrize("field", ["prompt", "question"])
def test_the_tasks_of_this_package_read_the_files_back(tmp_path, kind, encode, field):
    sides = dict(zip(("train", "val"), select(Addition(0), 30, 10), strict=True))
    files = {
        f"{name}.{kind.__name__.lower()}": encode(rows(side, name, "addition", "math")) for name, side in sides.items()
    }
    publish(tmp_path, files)
    paths = [str(tmp_path / name) for name in files]
    task = kind(0, path=paths[0], heldout_path=paths[1], prompt_field=field)
    assert len(task.train) == 30
    found = {problem.id: problem for problem in (*task.train, *task.held)}
    for problem in (*sides["train"], *sides["val"]):
        back = found[problem.id]
        assert back.prompt == (problem.prompt if field == "question" else [{"role": "user", "content": problem.prompt}])
        assert (back.answer, back.solution) == (problem.answer, problem.solution)


def test_problems_of_gym_keep_what_their_scorer_needs(tmp_path):
    pytest.importorskip("reasoning_gym", reason="it needs a C compiler to install")
    train, _ = select(Gym(0, name="chain_sum"), 5, 2)
    publish(tmp_path, {"train.jsonl": as_jsonl(rows(train, "train", "gym", "math"))})
    task = Jsonl(0, path=str(tmp_path / "train.jsonl"), heldout_fraction=0.0)
    score = GymReward()
    for problem in task.train:
        assert score(f"<answer>{problem.answer}</answer>", {"extra": problem.extra}) == 1.0
        assert score("<answer>x</answer>", {"extra": problem.extra}) == 0.0


def test_fields_of_several_types_do_not_fit_into_parquet():
    problems = [Problem("1", "a", "1", extra={"level": 3}), Problem("2", "b", "2", extra={"level": "hard"})]
    with pytest.raises(DataError, match='field "level" does not fit'):
        as_parquet(rows(problems, "train", "x", "math"))
    empty = [Problem("1", "a", "1", extra={"facts": {}})]
    with pytest.raises(DataError, match="do not fit"):
        as_parquet(rows(empty, "train", "x", "math"))


def test_publish_replaces_only_on_demand_and_leaves_no_traces(tmp_path):
    publish(tmp_path / "new", {"a": b"1", "b": b"2"})
    publish(tmp_path / "new", {"a": b"1", "b": b"2"})
    with pytest.raises(StorageError, match="exists already"):
        publish(tmp_path / "new", {"b": b"3", "a": b"3"})
    assert (tmp_path / "new" / "a").read_bytes() == b"1"
    publish(tmp_path / "new", {"a": b"3"}, force=True)
    assert {path.name: path.read_bytes() for path in (tmp_path / "new").iterdir()} == {"a": b"3", "b": b"2"}


@pytest.mark.parametrize("force", [False, True])
def test_a_folder_in_the_place_of_a_file_is_a_storage_error(tmp_path, force):
    (tmp_path / "b").mkdir()
    with pytest.raises(StorageError, match="b is a directory"):
        publish(tmp_path, {"a": b"1", "b": b"2"}, force)
    assert [path.name for path in tmp_path.iterdir()] == ["b"]
