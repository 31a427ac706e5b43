"""Runs whose sampling servers die, lag behind or lie: what they train on, how they end, and how they go on."""

import itertools
import json
import re
import shutil

import pytest

from retrain.errors import StorageError
from retrain.run.session import Resume
from tests.commands import invoke
from tests.engines.servers import ModelServer
from tests.small_runs import digest, rows

pytestmark = pytest.mark.slow

GENERATE = "/inference/v1/generate"


@pytest.fixture
def servers():
    pair = [ModelServer(), ModelServer()]
    yield pair
    for server in pair:
        server.kill()


@pytest.fixture
def options(servers):
    urls = json.dumps([server.url for server in servers])
    exact = ("model.dtype=float32", "vllm.dtype=float32", "rollout.parity_every=1", "logging.rollouts_every=1")
    return (
        f"vllm.urls={urls}",
        "rollout.engine=vllm-server",
        "vllm.start_timeout_s=5",
        "vllm.restart_timeout_s=0.1",
        *exact,
    )


def after(server, path, count, then):
    """Have the server do something before it answers the request number `count` to a path."""
    number = itertools.count(1)  # requests come in several threads

    def hook(asked):
        if asked == path and next(number) == count:
            then()
            raise ConnectionError

    server.hook = hook


def versions(run):
    """Steps of the weights that sampled each step's rollouts, from its files."""
    from retrain.storage.run_files import read_rows

    found = {}
    for file in sorted((run / "rollouts").iterdir()):
        for row in read_rows(file):
            found.setdefault(int(file.name.split("-")[1].split(".")[0]), set()).add(row["weights_version"])
    return found


def test_a_server_that_dies_leaves_its_work_to_the_other_and_no_trace_in_the_weights(train, servers, options):
    whole = train(*options, name="whole")
    # Evaluations, with the first one, are requests as well: this one is in the middle of training.
    after(servers[0], "/collective_rpc", 2, servers[0].kill)
    run = train(*options)
    metrics = rows(run / "metrics.jsonl")
    assert [row["sampler/servers"] for row in metrics] == [2, 1, 1, 1]
    assert versions(run) == {step: {step} for step in range(4)}
    assert all(row["parity/logp_diff_max"] < 1e-4 for row in metrics)
    assert digest(run) == digest(whole)


def trained(run):
    """Metrics of every step without what is said of the servers."""
    return [
        {name: value for name, value in row.items() if "sampler/" not in name} for row in rows(run / "metrics.jsonl")
    ]


@pytest.mark.parametrize("moment", [(GENERATE, 12), ("/collective_rpc", 4), (GENERATE, 21)])
def test_without_a_server_the_run_ends_with_exit_5_and_goes_on_where_it_was(
    train, servers, options, moment, tmp_path, toml, monkeypatch
):
    whole = train(*options, name="whole")

    def die():
        for server in servers:
            server.kill()

    for server in servers:
        server.hook = lambda path: None
    path, count = moment
    after(servers[0], path, count, die)
    where = (f'logging.dir="{tmp_path}/runs"', "logging.name=parts", "checkpoint.every=100")
    arguments = [part for option in (*options, *where) for part in ("--set", option)]
    ended = invoke("train", str(toml), "--plain", *arguments, code=5)
    assert "no vLLM server is usable" in ended.output
    folder = tmp_path / "runs" / "parts"
    done = len(rows(folder / "metrics.jsonl"))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    assert f"a checkpoint of step {done} is written; --resume auto continues from there" in ended.output
    for server in servers:
        server.hook = lambda path: None
        server.start()
    invoke("train", str(toml), "--plain", "--resume", "auto", *arguments, code=0)
    assert digest(folder) == digest(whole)
    assert trained(folder) == trained(whole)
    assert rows(folder / "eval.jsonl") == rows(whole / "eval.jsonl")


@pytest.mark.parametrize("fault", ["stale", "mixed"])
def test_nothing_is_trained_on_that_other_weights_sampled(train, servers, options, fault):
    after(servers[0], GENERATE, 8, lambda: setattr(servers[0], "fault", fault))
    run = train(*options)
    assert versions(run) == {step: {step} for step in range(4)}
    metrics = rows(run / "metrics.jsonl")
    assert sum(row["sampler/refused"] + row["sampler/reissued"] for row in metrics) > 0


def block(path):
    """Nothing can be written where a folder is."""
    path.unlink(missing_ok=True)
    path.mkdir(parents=True)


def stopping(path):
    """An observer that makes a path impossible to write once step 1 is done, before its weights are handed over."""

    def observe(event, details):
        if event == "step" and details["step"] == 1:
            block(path)

    return observe


def test_weights_that_cannot_be_written_end_the_run_with_what_was_trained_saved(train, servers, options, tmp_path):
    whole = train(*options, name="whole")
    run, options = tmp_path / "runs" / "run", (*options, "checkpoint.every=100")
    blocked = run / "vllm" / "model.safetensors"
    start = re.escape(f"{run.resolve()}/vllm/model.safetensors cannot be written: ")
    with pytest.raises(StorageError, match=f"^{start}") as ended:
        train(*options, observe=stopping(blocked))
    text = str(ended.value)
    assert text.endswith("a checkpoint of step 3 is written; --resume auto continues from there")
    assert "\n" not in text
    assert "free some space" in text
    status = json.loads((run / "status.json").read_text())
    assert (status["exit_code"], status["error"]) == (6, text)
    blocked.rmdir()
    assert digest(train(*options, resume=Resume("auto"))) == digest(whole)


def test_no_checkpoint_is_written_of_a_step_whose_metrics_could_not_be(train, servers, options, tmp_path):
    run = tmp_path / "runs" / "run"

    def observe(event, details):
        if event == "step" and details["step"] == 1:
            (run / "metrics.jsonl").rename(run / "kept")
            (run / "metrics.jsonl").mkdir()

    with pytest.raises(StorageError, match=r"metrics\.jsonl cannot be written: .*; step 3 is not saved"):
        train(*options, "checkpoint.every=100", observe=observe)
    assert not (run / "checkpoints").exists()


def test_a_run_is_exported_without_its_servers_and_sampled_without_them_if_told_so(train, servers, options, tmp_path):
    run = train(*options, "eval.every=4")
    last = rows(run / "eval.jsonl")[-1]
    asked = []
    for server in servers:
        server.hook = asked.append
    for source in (run, run / "checkpoints" / "step-000004"):
        invoke("export", str(source), str(tmp_path / "out"), code=0)
        assert (tmp_path / "out" / "model.safetensors").read_bytes() == (run / "model/model.safetensors").read_bytes()
        shutil.rmtree(tmp_path / "out")
    assert not asked
    for server in servers:
        server.kill()
    away = invoke("eval", str(run), "--trust", code=5)
    assert away.stderr.strip().endswith("or sample here: --set rollout.engine=torch")
    here = invoke("eval", str(run), "--set", "rollout.engine=torch", "--json", code=0)
    assert json.loads(here.stdout)["accuracy"] == last["accuracy"]


def test_an_engine_that_is_not_installed_keeps_no_model_from_being_exported(train, tmp_path, monkeypatch):
    run = train("eval.problems=0")
    file = run / "config.resolved.json"
    stored = json.loads(file.read_text())
    stored["rollout"]["engine"] = "vllm"
    stored["vllm"] = {"lora": "adapter"}
    file.write_text(json.dumps(stored))
    monkeypatch.setattr("importlib.util.find_spec", lambda name, package=None: None)
    invoke("export", str(run), str(tmp_path / "out"), code=0)
