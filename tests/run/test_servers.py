"""Runs whose sampling servers die, lag behind or lie: what they train on, how they end, and how they go on."""

import itertools
import json

import pytest
from typer.testing import CliRunner

from retrain.cli.main import app
from retrain.errors import EngineError
from retrain.run.session import Resume
from tests.engines.servers import ModelServer
from tests.run.conftest import digest, rows

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
    return (f"vllm.urls={urls}", "rollout.engine=vllm-server", "vllm.restart_timeout_s=0.1", *exact)


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
    from retrain.run.rundir import read_rows

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
    ended = CliRunner().invoke(app, ["train", str(toml), "--plain", *arguments])
    assert ended.exit_code == 5, ended.output
    assert "no vLLM server is left" in ended.output
    folder = tmp_path / "runs" / "parts"
    done = len(rows(folder / "metrics.jsonl"))
    assert [path.name for path in (folder / "checkpoints").iterdir()] == [f"step-{done:06d}"]
    for server in servers:
        server.hook = lambda path: None
        server.start()
    again = CliRunner().invoke(app, ["train", str(toml), "--plain", "--resume", "auto", *arguments])
    assert again.exit_code == 0, again.output
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


def test_weights_that_were_loaded_in_name_only_end_the_run(train, servers, options):
    """The version on every answer is the right one, and the parity gate sees that the log-probs are not."""
    after(servers[0], GENERATE, 8, lambda: setattr(servers[0], "fault", "pretends"))
    servers[1].kill()
    with pytest.raises(EngineError, match="sampler and trainer disagree"):
        train(*options, "training.lr=1e-2", resume=Resume("fresh"))
