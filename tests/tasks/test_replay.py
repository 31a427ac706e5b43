"""The source `replay`: what is stored, what is replayed and in which order, and files of other runs."""

import dataclasses
import gzip
import json
from types import SimpleNamespace

import pytest

from retrain.data.replay import Replay, read_groups
from retrain.errors import DataError
from tests.run.test_collect import rollout

CHAT = SimpleNamespace(decode=lambda ids: "so 2")
TEXT = SimpleNamespace(max_position_embeddings=64)
MODEL = SimpleNamespace(config=SimpleNamespace(get_text_config=lambda: TEXT))


def replay(prompts=4, said=None, **settings):
    observe = (lambda *_: None) if said is None else lambda event, details: said.append(details["text"])
    return Replay(CHAT, MODEL, prompts, "replay", observe, **settings)


def group(number, *rewards):
    """A group whose completions have these rewards."""
    return [rollout(number, reward) for reward in rewards]


def of_version(rollouts, version):
    turns = (dataclasses.replace(rollouts[0].turns[0], weights_version=version),)
    return [dataclasses.replace(one, turns=turns) for one in rollouts]


def shown(rows):
    """(group, rewards) of every group in the rows."""
    found = {}
    for one in rows:
        found.setdefault(one.group, []).append(one.reward)
    return [(number, tuple(rewards)) for number, rewards in found.items()]


def test_stored_groups_stand_in_for_groups_of_equal_rewards():
    source = replay(share=0.5)
    first = [*group(0, 1.0, 0.0), *group(1, 1.0, 1.0), *group(2, 0.0, 0.0), *group(3, 0.0, 0.5)]
    rows, metrics = source.take(0, first)
    assert rows == first, "nothing is stored yet"
    assert metrics == {"replay/groups": 0, "replay/stored": 2}
    second = of_version([*group(0, 1.0, 1.0), *group(1, 1.0, 1.0), *group(2, 0.0, 0.0), *group(3, 0.25, 0.0)], 1)
    rows, metrics = source.take(1, second)
    own, brought = rows[:4], rows[4:]
    assert own == second[4:], "two of three groups of equal rewards are left out: half of four prompts"
    assert shown(brought) == [(0, (1.0, 0.0)), (1, (0.0, 0.5))], "the larger deviation first"
    assert metrics == {"replay/groups": 2, "replay/stored": 3, "replay/staleness": 1}


def test_a_step_in_which_all_rewards_differ_replays_nothing():
    source = replay(prompts=2, share=1.0)
    step = [*group(0, 1.0, 0.0), *group(1, 1.0, 0.0)]
    source.take(0, step)
    assert source.take(1, step)[0] == step


def test_failed_rollouts_are_not_stored():
    source = replay(prompts=1, share=1.0)
    source.take(0, group(0, 1.0, 0.0, None))
    rows, _ = source.take(1, group(0, 1.0, 1.0))
    assert [one.reward for one in rows] == [1.0, 0.0]


@pytest.mark.parametrize(("priority", "order"), [("spread", [1.0, 0.75, 0.5]), ("recent", [0.5, 1.0, 0.75])])
def test_a_group_that_was_replayed_waits_until_the_others_were(priority, order):
    source = replay(prompts=1, share=1.0, priority=priority)
    for step, best in enumerate((0.75, 1.0, 0.5)):
        source.take(step, group(0, best, 0.0))
    found = [source.take(3 + n, group(0, 0.0, 0.0))[0][0].reward for n in range(4)]
    assert found == [*order, order[0]]


def test_old_groups_are_given_up():
    source = replay(prompts=1, share=1.0, max_staleness=2)
    source.take(0, group(0, 1.0, 0.0))
    equal = group(0, 0.0, 0.0)
    assert source.take(2, equal)[1]["replay/groups"] == 1
    assert source.take(3, equal) == (equal, {"replay/groups": 0, "replay/stored": 0})


def test_the_oldest_makes_room():
    source = replay(prompts=1, share=1.0, size=2)
    for step, best in enumerate((1.0, 0.5, 0.25)):
        source.take(step, group(0, best, 0.0))
    found = {source.take(3, group(0, 0.0, 0.0))[0][0].reward for _ in range(3)}
    assert found == {0.5, 0.25}


def test_state_goes_through_json_and_continues():
    source, other = replay(prompts=1, share=1.0), replay(prompts=1, share=1.0)
    for step, best in enumerate((1.0, 0.5)):
        source.take(step, group(0, best, 0.0))
    source.take(2, group(0, 0.0, 0.0))
    other.load_state_dict(json.loads(json.dumps(source.state_dict())))
    for step in (3, 4, 5):
        assert other.take(step, group(0, 0.0, 0.0)) == source.take(step, group(0, 0.0, 0.0))


def stored(folder, *steps):
    folder.mkdir()
    for number, rollouts in enumerate(steps):
        text = "".join(json.dumps(one.row()) + "\n" for one in rollouts)
        (folder / f"step-{number:06}.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    return str(folder)


def test_rollouts_of_another_run_have_no_age(tmp_path):
    path = stored(tmp_path / "rollouts", group(0, 1.0, 0.0), [*group(0, 1.0, 1.0), *group(1, 0.5, 0.0)])
    said = []
    source = replay(1, said, share=1.0, path=path, max_staleness=1)
    assert said == [f"{path}: 2 groups with different rewards; 2 of them are stored"]
    rows, metrics = source.take(50, group(0, 0.0, 0.0))
    assert shown(rows) == [(0, (1.0, 0.0))]
    assert "replay/staleness" not in metrics
    assert source.fingerprint() == replay(path=path).fingerprint() != replay().fingerprint()


def test_files_that_are_no_rollouts_are_refused(tmp_path):
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1?"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not a rollout in the format of a run"):
        read_groups(str(tmp_path / "rows.jsonl"))
    with pytest.raises(DataError, match="neither a file of rollouts nor a folder"):
        read_groups(str(tmp_path))
    path = stored(tmp_path / "rollouts", [dataclasses.replace(one, text="so 3") for one in group(0, 1.0, 0.0)])
    with pytest.raises(DataError, match="sampled with another tokenizer"):
        replay(path=path)
