"""Checkpoints survive kills, bit flips, full disks and hostile directories."""

import hashlib
import json
import os
import pickle
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from retrain.errors import StorageError, UserCodeError
from retrain.storage.checkpoint import load, newest, problem, save, step_of
from tests.forks import finish, forked
from tests.full_disk import run_script


def some_state(step):
    return {
        "policy": {"w": torch.full((3, 2), float(step)), "lr": 0.1},
        "signals": {"sepa": {"seen": step}},
        "loop": {"step": step, "rng": torch.arange(5, dtype=torch.uint8)},
    }


def quiet(_line):
    pass


def same(a, b):
    """Equal in value, type, dtype and key types, all the way down."""
    if torch.is_tensor(a):
        return torch.is_tensor(b) and a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
    if type(a) is not type(b):
        return False
    if isinstance(a, dict):
        return list(map(repr, a)) == list(map(repr, b)) and all(same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return repr(a) == repr(b)


def test_a_real_optimizer_comes_back_exactly(tmp_path):
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    state = {"policy": {"model": dict(model.state_dict()), "optimizer": optimizer.state_dict()}}

    back = load(save(tmp_path, 1, state, keep=1))

    assert same(back, state)
    assert list(back["policy"]["optimizer"]["state"]) == [0, 1]  # parameter ids stay ints
    assert back["policy"]["optimizer"]["param_groups"][0]["betas"] == (0.9, 0.95)  # a tuple stays a tuple
    torch.optim.AdamW(model.parameters()).load_state_dict(back["policy"]["optimizer"])


KEYS = st.none() | st.booleans() | st.integers() | st.text(max_size=4) | st.sampled_from(["$tensor", "$tuple", "a.b"])
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=True) | st.text(max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(KEYS, inner, max_size=3)
    ),
    max_leaves=8,
)


@settings(deadline=None, max_examples=60)
@given(value=VALUES)
def test_every_json_value_and_python_key_round_trips(tmp_path_factory, value):
    state = {"part": {"value": value}}
    assert same(load(save(tmp_path_factory.mktemp("c"), 0, state, keep=1)), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.uint8, torch.bool])
def test_dtype_scalars_and_empty_tensors_are_kept(tmp_path, dtype):
    state = {"a": {"x": torch.ones(3, 2).to(dtype), "scalar": torch.tensor(1).to(dtype), "none": torch.empty(0, 4)}}
    assert same(load(save(tmp_path, 0, state, keep=1)), state)


def test_shared_memory_is_stored_once_and_views_are_copied(tmp_path):
    weight = torch.randn(100, 100)
    parameter = torch.nn.Parameter(weight)
    state = {
        "model": {"embed": weight, "head": parameter, "flat": weight.view(-1), "row": weight[3], "turned": weight.t()},
        "odd": {"a.b": torch.zeros(1), "a": {"b": torch.ones(1)}},
    }
    path = save(tmp_path, 0, state, keep=1)
    back = load(path)
    assert back["model"]["embed"].data_ptr() == back["model"]["head"].data_ptr()
    assert all(torch.equal(back["model"][key], state["model"][key].detach()) for key in state["model"])
    assert same(back["odd"], state["odd"])
    assert (path / "model.safetensors").stat().st_size < 3.2 * weight.nbytes  # embed = head, flat, row, turned


def test_a_set_in_the_state_is_refused_by_name(tmp_path):
    with pytest.raises(UserCodeError, match=r"state signals\.mine\.seen is a set"):
        save(tmp_path, 0, {"signals": {"mine": {"seen": {1}}}}, keep=1)
    assert list(tmp_path.iterdir()) == []


def test_component_names_cannot_leave_the_directory(tmp_path):
    root = tmp_path / "checkpoints"
    state = {"../../evil": {"w": torch.ones(1)}, "my.mod:fn": {"w": torch.zeros(1)}}
    assert same(load(save(root, 0, state, keep=1)), state)
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoints"]


def test_retention_and_replacement(tmp_path):
    for step in (1, 2, 3, 3):
        save(tmp_path, step, some_state(step), keep=2)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]
    save(tmp_path, 3, {"loop": {"new": True}}, keep=2)
    assert load(tmp_path / "step-000003") == {"loop": {"new": True}}
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-000002", "step-000003"]


def test_a_kill_while_replacing_leaves_the_replaced_one(tmp_path):
    save(tmp_path, 3, some_state(3), keep=1).rename(tmp_path / "step-000003.old")
    assert newest(tmp_path, quiet, holds_lock=True)[0] == tmp_path / "step-000003.old"
    assert same(load(tmp_path / "step-000003.old"), some_state(3))
    assert step_of(tmp_path / "step-000003.old") == 3
    save(tmp_path, 3, some_state(3), keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-000003"]


def test_none_where_there_never_was_one(tmp_path):
    assert newest(tmp_path / "absent", quiet, holds_lock=True) is None
    assert newest(tmp_path, quiet, holds_lock=True) is None


def flip(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


DAMAGE = {
    "flip": flip,
    "truncate": lambda file: os.truncate(file, file.stat().st_size // 2),
    "missing": lambda file: file.unlink(),
    "empty": lambda file: file.write_bytes(b""),
    "extended": lambda file: file.write_bytes(file.read_bytes() + b" x"),
}
FILES = ["policy.safetensors", "loop.safetensors", "state.json", "manifest.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", DAMAGE)
def test_damage_is_rejected_by_name_and_the_previous_one_is_used(tmp_path, name, damage):
    save(tmp_path, 1, some_state(1), keep=2)
    last = save(tmp_path, 2, some_state(2), keep=2)
    DAMAGE[damage](last / name)
    with pytest.raises(StorageError, match=name):
        load(last)
    lines = []
    assert newest(tmp_path, lines.append, holds_lock=True)[0] == tmp_path / "step-000001"
    assert len(lines) == 1
    assert name in lines[0]
    assert "step-000002" in lines[0]
    assert (tmp_path / "bad-step-000002").is_dir()
    assert not last.exists()


def test_a_flip_in_any_byte_of_a_manifest_matters(tmp_path):
    path = save(tmp_path, 2, {"loop": {"step": 2}}, keep=1)
    manifest = path / "manifest.json"
    good = manifest.read_bytes()
    for position in range(len(good)):
        for bit in (0, 5):  # another character, and the other case of a letter
            bad = bytearray(good)
            bad[position] ^= 1 << bit
            manifest.write_bytes(bad)
            if problem(path) is None:  # only white space between tokens may differ
                assert json.loads(bad) == json.loads(good)
    manifest.write_bytes(good)
    assert problem(path) is None


def test_all_bad_never_starts_from_zero(tmp_path):
    for step in (1, 2):
        flip(save(tmp_path, step, some_state(step), keep=2) / "state.json")
    with pytest.raises(StorageError, match=r"step-000001: state\.json") as first:
        newest(tmp_path, quiet, holds_lock=True)
    assert first.value.exit_code == 6
    assert "step-000002: state.json" in str(first.value)
    with pytest.raises(StorageError, match=r"bad-step-000001: state\.json"):  # nor on the second try
        newest(tmp_path, quiet, holds_lock=True)


def hostile(path, name):
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][name] = manifest["files"]["state.json"]
    (path / "manifest.json").write_text(json.dumps(manifest))


def test_names_that_leave_the_directory_and_symlinks_are_refused(tmp_path):
    root = tmp_path / "checkpoints"
    for step, name in enumerate(["../outside.json", "/etc/passwd", "..", "sub/../state.json", "a\\b"]):
        path = save(root, step, some_state(step), keep=9)
        hostile(path, name)
        with pytest.raises(StorageError, match="not a plain file"):
            load(path)
    path = save(root, 20, some_state(20), keep=9)
    moved = tmp_path / "outside.json"
    (path / "state.json").rename(moved)
    (path / "state.json").symlink_to(moved)
    with pytest.raises(StorageError, match=r"state\.json: not a plain file"):
        load(path)
    path = save(root, 21, some_state(21), keep=9)
    (path / "manifest.json").rename(tmp_path / "m.json")
    (path / "manifest.json").symlink_to(tmp_path / "m.json")
    with pytest.raises(StorageError, match="not a plain file"):
        load(path)
    linked = root / "step-000022"
    linked.symlink_to(save(root, 19, some_state(19), keep=9))
    with pytest.raises(StorageError, match="not a directory"):
        load(linked)


class Canary:
    """What makes a folder when it is unpickled."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def test_pickles_in_a_checkpoint_are_not_opened(tmp_path):
    data = pickle.dumps(Canary(tmp_path / "canary"))
    foreign = tmp_path / "checkpoints" / "step-000009"  # as torch.distributed.checkpoint writes one
    foreign.mkdir(parents=True)
    for name in (".metadata", "__0_0.distcp"):
        (foreign / name).write_bytes(data)
    with pytest.raises(StorageError, match=r"manifest\.json"):
        load(foreign)
    path = save(tmp_path / "other", 1, some_state(1), keep=1)
    (path / ".metadata").write_bytes(data)
    load(path)  # what the manifest does not list is not read
    hashed = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    (path / "state.json").write_bytes(data)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"] |= {"state.json": hashed, ".metadata": hashed}
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(StorageError, match=r"state\.json cannot be read"):
        load(path)
    assert not (tmp_path / "canary").exists()


def test_wrong_step_format_and_manifest_without_state(tmp_path):
    path = save(tmp_path, 5, some_state(5), keep=2)
    shutil.copytree(path, tmp_path / "step-000009")
    assert problem(tmp_path / "step-000009") == "manifest.json: written for step 5"
    for changed, reason in (
        ({"format": 3}, "format 3"),
        ({"files": {}}, "does not list state.json"),
        ({"files": 3}, "manifest.json: files: expected an object"),
    ):
        copy = tmp_path / "step-000005"
        manifest = json.loads((copy / "manifest.json").read_text())
        (copy / "manifest.json").write_text(json.dumps(manifest | changed))
        assert reason in str(problem(copy))
        (copy / "manifest.json").write_text(json.dumps(manifest))


FULL_DISK = """
from pathlib import Path
import torch
from retrain.errors import StorageError
from retrain.storage.checkpoint import load, newest, save

root = Path(sys.argv[1])
save(root, 1, {"policy": {"w": torch.ones(10)}, "loop": {"text": "x"}}, keep=2)
fill()
for state in ({"policy": {"w": torch.ones(100_000)}}, {"loop": {"text": "x" * 100_000}}):
    try:
        save(root, 2, state, keep=2)
    except StorageError as error:
        assert "previous checkpoints are intact" in str(error), error
        assert "free some space" in str(error), error
        assert error.exit_code == 6
    else:
        raise SystemExit("the save went through")
    assert [path.name for path in root.iterdir()] == ["step-000001"], list(root.iterdir())
free()
assert torch.equal(newest(root, print, holds_lock=True)[1]["policy"]["w"], torch.ones(10))
save(root, 2, {"loop": {}}, keep=2)
"""


def output(source, *args):
    done = run_script(source, *args, code=0)
    return done.stdout


def test_a_write_that_hits_the_limit_leaves_the_old_checkpoint_and_no_stray_file(tmp_path):
    output(FULL_DISK, tmp_path / "c")


KILLS = """
import os, signal, sys
from pathlib import Path
import torch
from retrain.storage.checkpoint import load, newest, save, step_of

root, done, fatal = Path(sys.argv[1]), 0, 0

def count(event, facts):
    global done
    done += 1
    if done == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

def state(step):
    values = torch.arange(50_000, dtype=torch.float32) + step
    return {"policy": {"w": values, "m": {0: values * 2}}, "loop": {"step": step}}

for step in (1, 2):
    save(root, step, state(step), keep=2)
sys.addaudithook(count)  # the files that are opened, renamed, listed, removed
save(root, 3, state(3), keep=2)
points, staged = done, 0
for point in range(1, points + 3):
    start = step_of(newest(root, print, holds_lock=True)[0])
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        done, fatal = 0, point
        for step in range(start + 1, start + 4):
            save(root, step, state(step), keep=2)
            os.write(writer, step.to_bytes(4, "big"))
    assert os.waitpid(child, 0)[1] == signal.SIGKILL
    os.close(writer)
    acknowledged = os.read(reader, 1 << 16)[-4:]
    os.close(reader)
    staged += any(root.glob(".tmp-*"))
    path, _ = newest(root, lambda line: sys.exit("rejected: " + line), holds_lock=True)
    step = step_of(path)
    assert step >= (int.from_bytes(acknowledged, "big") if acknowledged else start)
    back = load(path)
    assert back["loop"]["step"] == step
    assert torch.equal(back["policy"]["w"], state(step)["policy"]["w"])
    assert torch.equal(back["policy"]["m"][0], state(step)["policy"]["m"][0])
save(root, 100_000, state(100_000), keep=2)
assert not list(root.glob(".tmp-*"))
print(points, staged)
"""


def test_sigkill_at_any_point_of_a_save_never_loses_or_mixes_a_checkpoint(tmp_path):
    points, staged = map(int, output(KILLS, tmp_path / "c").split())
    assert points > staged > 5, "before, inside and after what is written"


def write_many(root, keep):
    for step in range(1, 201):
        save(root, step, {"policy": {"w": torch.full((20_000,), float(step))}}, keep=keep)


@pytest.mark.slow
@pytest.mark.parametrize("keep", [1, 2])
def test_readers_beside_a_writer_read_whole_checkpoints_and_change_nothing(tmp_path, keep):
    save(tmp_path, 0, {"policy": {"w": torch.zeros(20_000)}}, keep=keep)
    writer = forked(write_many, tmp_path, keep)
    reads = 0
    while writer.exitcode is None:
        found = newest(tmp_path, pytest.fail, holds_lock=False)
        assert found is not None
        path, state = found
        assert torch.all(state["policy"]["w"] == float(step_of(path)))
        reads += 1
    finish(writer)
    assert reads > 1
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:06d}" for step in range(201 - keep, 201)]
