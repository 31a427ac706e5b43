"""The trackers write what they are told and nothing secret."""

import json
import os
import sqlite3
import subprocess
import sys

import pytest

from retrain.errors import MissingExtraError
from retrain.registry import bind, find
from tests.forks import PYTHON
from tests.waiting import PATIENCE_S

CANARY = "canary-4711"


def built(name, run_dir, **params):
    return find("tracker", name).bind(params).build({"run_dir": run_dir})


def test_declaring_trackers_imports_none_of_them():
    source = (
        "import sys, retrain.tracking.trackers;"
        "print([m for m in ('wandb', 'tensorboard', 'trackio', 'torch', 'numpy') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", source], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_a_missing_package_names_its_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    for name in ("tensorboard", "trackio"):
        with pytest.raises(MissingExtraError, match=rf"\[{name}\]"):
            bind("tracker", name)


WANDB = """
import sys
from pathlib import Path
from retrain.registry import find
run_dir = Path(sys.argv[1])
params = {"project": "p", "group": "g", "tags": ["a", "b"]}
for start in (0, 3):  # the run, and the run resumed
    made = find("tracker", "wandb").bind(params).build({"run_dir": run_dir})
    made.resumed([(step, {"reward/mean": step / 10}) for step in range(start)])
    made.completions(start, [{"prompt": "1+1=", "text": f"said {row}", "reward": row or None} for row in range(2)])
    for step in range(start, start + 3):
        made.log(step, {"reward/mean": step / 10, "loss/total": float("nan")})
    made.log(start + 2, {"eval/accuracy": 0.25})
    assert made.where.startswith(f"wandb sync {run_dir}/wandb/offline-run-"), made.where
    made.close()
"""


@pytest.mark.slow
def test_wandb_works_offline_into_the_run_directory_and_tells_no_secret(tmp_path):
    (tmp_path / "config.resolved.json").write_text(json.dumps({"training": {"lr": 0.125}}))
    env = {k: v for k, v in os.environ.items() if not k.startswith("WANDB")}
    env |= {"HOME": str(tmp_path / "home"), "SOME_TOKEN": CANARY}
    done = subprocess.run(
        [PYTHON, "-c", WANDB, str(tmp_path), f"--key={CANARY}"],
        capture_output=True,
        text=True,
        env=env,
        timeout=PATIENCE_S,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    files = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    data = b"".join(file.read_bytes() for file in files)
    assert any(file.suffix == ".wandb" for file in files)
    assert b"reward/mean" in data
    assert b"eval/accuracy" in data
    assert b"0.125" in data
    folders = [path.name for path in (tmp_path / "wandb").iterdir() if path.name.startswith("offline-run")]
    assert folders
    assert logged_steps(sorted(tmp_path.glob("wandb/offline-run-*/*.wandb"))[-1]) == [*range(6), 5]
    assert all(f"-{(tmp_path / 'run_id').read_text()}" in name for name in folders)  # a -1 follows within one second
    [table, again] = (json.loads(file.read_text()) for file in files if file.name.endswith(".table.json"))
    assert table["columns"] == again["columns"] == ["prompt", "text", "reward"]
    assert table["data"] == [["1+1=", "said 0", None], ["1+1=", "said 1", 1]]
    assert CANARY.encode() not in data
    assert CANARY not in done.stdout + done.stderr
    assert "WARNING" not in done.stderr


def logged_steps(file):
    """The steps of the rewards and evaluations in a file of wandb, which is a log of LevelDB with its own header."""
    from wandb.proto.wandb_internal_pb2 import Record  # pyright: ignore[reportAttributeAccessIssue]

    data, at, whole, steps = file.read_bytes(), 7, b"", []
    while at + 7 <= len(data):
        if (left := 32768 - at % 32768) < 7:  # no record header fits into the rest of a block
            at += left
            continue
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        whole += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):  # a full record, or its last part
            items = {
                "".join((*item.nested_key, item.key)): item.value_json for item in Record.FromString(whole).history.item
            }
            whole = b""
            if {"reward/mean", "eval/accuracy"} & items.keys():
                steps.append(int(items["step"]))
    return steps


def test_tensorboard_writes_every_scalar(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    (tmp_path / "config.resolved.json").write_text(json.dumps({"training": {"lr": 0.125}}))
    made = built("tensorboard", tmp_path)
    for step in range(3):
        made.log(step, {"reward/mean": step / 4})
    made.completions(2, [{"text": "# said"}])
    made.close()
    assert made.where == f"tensorboard --logdir {tmp_path}/tensorboard"
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("reward/mean")] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    texts = [
        event.tensor_proto.string_val[0].decode() for tag in events.Tags()["tensors"] for event in events.Tensors(tag)
    ]
    assert any('"lr": 0.125' in text for text in texts)
    assert [text for text in texts if "said" in text] == ["```\ntext: # said\n```"]


TRACKIO = """
import sys
from pathlib import Path
from retrain.registry import find
for fresh in (False, True):
    if fresh:
        (Path(sys.argv[1]) / "run_id").unlink()
    made = find("tracker", "trackio").bind({"project": "p", "name": "n"}).build({"run_dir": Path(sys.argv[1])})
    for step in range(3):
        made.log(step, {"reward/mean": step / 4, "loss/total": float("nan")})
    made.completions(2, [{"prompt": "1+1=", "text": "said", "reward": 1.0}])
    made.close()
"""


def test_trackio_stores_rows_on_this_machine(tmp_path):
    pytest.importorskip("trackio", reason="`make test` does not install it and the web server that it brings")
    env = {**os.environ, "TRACKIO_DIR": str(tmp_path / "store"), "HF_HOME": str(tmp_path / "hf"), "HF_HUB_OFFLINE": "1"}
    command = [PYTHON, "-c", TRACKIO, str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
    data = b"".join(file.read_bytes() for file in (tmp_path / "store").rglob("*") if file.is_file())
    assert b"reward/mean" in data
    [store] = [file for file in (tmp_path / "store").glob("*.db")]
    with sqlite3.connect(store) as database:
        counts = database.execute("SELECT run_name, COUNT(*) FROM metrics GROUP BY run_name").fetchall()
    assert [count for _, count in counts] == [4, 4]
    assert all(name.startswith("n-") for name, _ in counts)


def test_a_resumed_run_replaces_its_steps_in_tensorboard(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for first, value in ((0, 1.0), (2, 2.0)):  # the second start continues a checkpoint after two steps
        made = built("tensorboard", tmp_path)
        for step in range(first, 4):
            if step not in (2,) or value == 1.0:  # the evaluation of the checkpoint is in eval.jsonl already
                made.log(step, {"eval/accuracy": value})
            made.log(step, {"reward/mean": value})
        made.close()
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [(one.step, one.value) for one in events.Scalars("eval/accuracy")] == [
        *[(s, 1.0) for s in range(3)],
        (3, 2.0),
    ]
    rewards = dict((one.step, one.value) for one in events.Scalars("reward/mean"))
    assert rewards == {0: 1.0, 1: 1.0, 2: 2.0, 3: 2.0}
