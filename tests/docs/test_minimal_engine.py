"""The engines of docs/minimal-engine.md train as they stand in the page."""

import json
import re
import threading
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from safetensors.torch import load_file

from retrain.config.load import load
from retrain.errors import EngineError
from retrain.run.build import untrained_model
from retrain.types import Request, Sampling
from tests.small_runs import rows, toml, train  # noqa: F401 - fixtures
from tests.training.small_models import make_model

PAGE = Path(__file__).parents[2] / "docs" / "minimal-engine.md"
ENGINE = "rollout.engine=minimal_engine.MinimalEngine"


@pytest.fixture
def code(tmp_path: Path) -> str:
    text, server = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    (tmp_path / "minimal_engine.py").write_text(text)
    (tmp_path / "server_engine.py").write_text(server)
    return text


@pytest.fixture
def url(code, toml):  # noqa: F811
    """Address of an inference server with the protocol of the page, which samples with the page's first engine."""
    scope: dict = {}
    exec(code, scope)
    model, _ = untrained_model(load(toml))
    engine = scope["MinimalEngine"](model.model)

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = json.dumps(getattr(self, self.path[1:])(**body)).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def load(self, path):
            engine.load_weights(load_file(path), engine.version + 1)
            return {}

        def sample(self, prompt, n, max_tokens, seed, **settings):
            settings["stop_ids"] = tuple(settings["stop_ids"])
            request, sampling = Request(tuple(prompt), n, max_tokens, seed[1]), Sampling(seed=seed[0], **settings)
            [found] = engine.sample([request], sampling)
            return {"completions": [asdict(one) for one in found]}

        def log_message(self, format, *args):
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_it_has_at_most_sixty_lines(code):
    assert len([line for line in code.splitlines() if line.strip()]) <= 60


def test_a_run_trains_with_it(code, train, tmp_path):  # noqa: F811
    options = (ENGINE, f'plugins.search_paths=["{tmp_path}"]', "model.dtype=float32")
    steps = rows(train(*options) / "metrics.jsonl")
    assert len(steps) == 4
    assert max(row["parity/logp_diff_mean"] for row in steps if "parity/logp_diff_mean" in row) < 1e-4
    assert any(row["grad/norm"] > 0 for row in steps)


def test_a_run_trains_with_a_server(url, train, toml, tmp_path):  # noqa: F811
    toml.write_text(toml.read_text() + f'\n[server_engine]\nurl = "{url}"\n')
    options = (
        "rollout.engine=server_engine.ServerEngine",
        f'plugins.search_paths=["{tmp_path}"]',
        "rollout.overlap=1",
        "reward_pool.workers=1",
    )
    steps = rows(train(*options, "model.dtype=float32") / "metrics.jsonl")
    assert [row["rollout/staleness"] for row in steps] == [0, 1, 1, 1]
    assert max(row["parity/logp_diff_mean"] for row in steps if "parity/logp_diff_mean" in row) < 1e-4
    assert any(row["grad/norm"] > 0 for row in steps)


def test_a_server_that_is_gone_ends_the_run(code, train, toml, tmp_path):  # noqa: F811
    toml.write_text(toml.read_text() + '\n[server_engine]\nurl = "http://127.0.0.1:9"\n')
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9/load: "):
        train("rollout.engine=server_engine.ServerEngine", f'plugins.search_paths=["{tmp_path}"]')


def test_what_a_request_draws_depends_on_no_other(code):
    scope: dict = {}
    exec(code, scope)
    engine = scope["MinimalEngine"](make_model("qwen3"))
    requests = [Request((1, 2, 3), 2, 6, stream) for stream in (0, 1)]
    together = engine.sample(requests, Sampling(seed=7))
    assert together == [engine.sample([request], Sampling(seed=7))[0] for request in requests]
    assert together[0] != together[1]
    [[greedy]] = engine.sample([Request((1, 2, 3), 1, 6, 0)], Sampling(temperature=0.0))
    assert len(greedy.ids) == len(greedy.logprobs) == 6
