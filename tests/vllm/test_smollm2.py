"""Steps of a real language model on real vLLM, in process with all weights and with LoRA, and on two servers.

Everything is at its default but for sizes: on a CPU that multiplies bfloat16, so do trainer and sampler.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from retrain.config.load import load
from retrain.run.session import Resume, run
from retrain.tools.rollout_scores import results_file, score_file
from tests.small_runs import rows
from tests.smollm2 import FOLDER, needs_smollm2
from tests.waiting import ends

pytestmark = [pytest.mark.vllm, needs_smollm2]
ROOT = Path(__file__).parents[2]
TOML = """
task = {{ name = "addition" }}
rollout = {{ engine = "{engine}", parity_every = 1 }}
training = {{ max_steps = 3, batch_size = 2, group_size = 4, max_tokens = 16 }}
eval = {{ every = 0, problems = 2 }}
checkpoint = {{ every = 0 }}
logging = {{ dir = "{runs}" }}
[model]
path = "{folder}"
{lora}
[[rewards]]
name = "number"
[[rewards]]
name = "tests.vllm.models.tell_apart"  # completions that reach max_tokens may all have the reward 0 of the task
[vllm]
max_model_len = 128
kv_cache_mb = 64
{urls}
"""
LORA = pytest.mark.parametrize("lora", ["", "[model.lora]"], ids=["full", "LoRA"])


def trained(tmp_path, engine, lora, urls=""):
    """The metrics of a run: every step passed the parity check, and weights have reached the sampler twice."""
    file = tmp_path / "run.toml"
    file.write_text(TOML.format(folder=FOLDER, lora=lora, engine=engine, urls=urls, runs=tmp_path / "runs"))
    directory = run(load(file), Resume("fresh"), lambda event, details: None)
    found = rows(directory / "metrics.jsonl")
    assert [row["step"] for row in found] == [0, 1, 2]
    assert all(row["parity/logp_diff_mean"] < 0.1 for row in found)
    assert all(row["update/skipped"] == 0 for row in found)
    assert len(score_file(str(results_file(directory)))) == 2
    return found


@LORA
def test_a_real_model_trains_on_vllm_in_process(tmp_path, lora):
    trained(tmp_path, "vllm", lora)


@pytest.fixture
def serving(tmp_path):
    """Start `retrain serve` twice for a file of urls that are free; returns them once both answer."""
    started = []

    def start():
        from tests.vllm.test_server import free_port

        urls = [f"http://127.0.0.1:{free_port()}" for _ in range(2)]
        listed = "urls = [" + ", ".join(f'"{url}"' for url in urls) + "]"
        file = tmp_path / "serve.toml"
        text = TOML.format(folder=FOLDER, lora="", engine="vllm-server", urls=listed, runs=tmp_path / "runs")
        file.write_text(text)
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        for number, url in enumerate(urls):
            log = (tmp_path / f"server-{number}.log").open("w")
            command = [sys.executable, "-m", "retrain", "serve", str(file), "--port", url.rpartition(":")[2]]
            process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment)
            started.append((process, log))
        for number, (process, _) in enumerate(started):
            said = []
            while not said or not said[-1].startswith("urls"):
                said.append(process.stdout.readline())
                if not said[-1]:
                    pytest.fail("".join(said) + (tmp_path / f"server-{number}.log").read_text()[-3000:])
        return listed

    yield start
    for process, _ in started:
        process.terminate()
    for process, log in started:
        ends(process)
        process.stdout.close()
        log.close()


def test_a_real_model_trains_on_two_vllm_servers(tmp_path, serving):
    found = trained(tmp_path, "vllm-server", "", serving())
    assert all(row["sampler/servers"] == 2 for row in found)
