"""`retrain train` and the commands that follow it, as a user calls them."""

import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from tests.cli.conftest import PLUGINS
from tests.forks import run_command
from tests.full_disk import run_script
from tests.small_runs import TOML, digest, rows


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cli):
    """The folder of a finished run of the small configuration, for all to copy."""
    folder = tmp_path_factory.mktemp("finished")
    (folder / "run.toml").write_text(TOML)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        result = cli("train", "run.toml", "--plain")
    assert result.exit_code == 0, result.output
    return folder


@pytest.fixture
def run(folder, finished):
    """A finished run of the small configuration."""
    shutil.copytree(finished, folder, dirs_exist_ok=True)
    return folder / "runs" / "run"


def test_train_ends_with_a_sentence_and_refuses_to_run_over_it(run, cli):
    assert (run / "model" / "README.md").is_file()
    again = cli("train", "run.toml", "--plain", code=2)
    assert "--fresh" in again.output
    fresh = cli("train", "run.toml", "--plain", "--fresh", "--set", "training.max_steps=1", code=0)
    assert "held-out accuracy" in fresh.stdout.splitlines()[-1].lower()


@pytest.mark.parametrize("options", [["--fresh"], ["--json"], ["--resume", "runs/run/checkpoints/step-000001"]])
def test_a_slurm_job_takes_no_option_that_holds_for_one_start_only(folder, cli, options):
    refused = cli("train", "run.toml", "--ranks", "2", "--slurm", "2", *options, code=2)
    assert "a SLURM job resumes its run" in refused.output
    script = cli("train", "run.toml", "--ranks", "2", "--slurm", "2", "--allow-change", "optimizer.lr").stdout
    assert "--resume auto --plain --allow-change optimizer.lr &" in script


@pytest.mark.parametrize(
    "options",
    [
        ['algorithm.advantage_mode="mine.hipa_like_advantages"'],
        ['algorithm.advantage_mode="mine.scaled"', "algorithm.advantage_params={scale = 3.0}"],
        ['algorithm.transform_mode="mine.my_transform"', "algorithm.transform_params={scale = 2.0}"],
        ['algorithm.algorithm_mode="mine.my_algorithm"'],
    ],
    ids=["list", "params", "ctx", "algorithm"],
)
def test_documented_plugins_run_from_the_users_folder(folder, cli, options):
    (folder / "mine.py").write_text(PLUGINS)
    flags = [part for option in [*options, "training.max_steps=2"] for part in ("--set", option)]
    if "my_algorithm" in options[0]:  # once as the installed command, whose folder is not on Python's path
        run_command("train", "run.toml", *flags, cwd=folder, code=0)
    else:
        assert cli("train", "run.toml", *flags).exit_code == 0
    row = json.loads((folder / "runs/run/metrics.jsonl").read_text().splitlines()[0])
    assert row["advantage/abs_mean"] > 0
    assert ("mine/best" in row) == ("my_algorithm" in options[0])


def test_a_plugin_that_returns_the_wrong_length_is_named(folder, cli):
    (folder / "short_one.py").write_text("def short(rewards):\n    return rewards[:-1]\n")
    result = cli("train", "run.toml", "--plain", "--set", "algorithm.advantage_mode=short_one.short", code=1)
    assert "short_one.short" in result.output


@pytest.mark.slow
def test_eval_measures_the_saved_model_and_its_checkpoints(run, cli):
    final = json.loads(cli("eval", "--trust", str(run), "--json").stdout)
    last = json.loads((run / "eval.jsonl").read_text().splitlines()[-1])
    assert final["accuracy"] == last["accuracy"]
    assert final["avg_tokens"] == last["avg_tokens"], "the same weights sample the same completions"
    several = cli("eval", "--trust", str(run), "--set", "eval.samples=4", "--set", "eval.pass_at=[1,4]", "--json")
    assert {"pass@1", "pass@4", "avg@4"} <= set(json.loads(several.stdout))
    checkpoint = json.loads(cli("eval", "--trust", str(run / "checkpoints" / "step-000002"), "--json").stdout)
    middle = [json.loads(line) for line in (run / "eval.jsonl").read_text().splitlines()][1]
    assert checkpoint["step"] == middle["step"] == 2
    assert checkpoint["avg_tokens"] == middle["avg_tokens"]
    assert "accuracy" in cli("eval", "--trust", str(run)).stdout
    every = [
        json.loads(line) for line in cli("eval", "--trust", str(run), "--all-checkpoints", "--json").stdout.splitlines()
    ]
    assert [(row["step"], row["accuracy"]) for row in every] == [(2, middle["accuracy"]), (4, last["accuracy"])]
    assert "after 4 steps" in cli("eval", "--trust", str(run), "--all-checkpoints").stdout.splitlines()[-1]


def test_eval_writes_completions_for_score_and_leaves_the_run_alone(run, cli, tmp_path):
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps({"prompt": f"{n}+1=", "answer": str(n + 1)}) + "\n" for n in range(3)))
    held = f'eval.sets=[{{name="other", task="jsonl", task_params={{path="{other}"}}, samples=4, pass_at=[2]}}]'
    before = sorted(run.glob("eval/*"))
    options = ("--set", held, "--set", "eval.problems=0", "--out", str(tmp_path / "new" / "scores"), "--json")
    row = json.loads(cli("eval", "--trust", str(run), *options).stdout)
    scored = cli("score", str(tmp_path / "new" / "scores"), "--eval-set", "other", "--k", "2", "--json")
    facts = json.loads(scored.stdout)
    assert (facts["problems"], facts["rollouts"]) == (3, 12)
    assert facts["pass@2"]["value"] == row["other/pass@2"]
    assert facts["pass@2"]["low"] <= facts["pass@2"]["value"] <= facts["pass@2"]["high"]
    assert sorted(run.glob("eval/*")) == before


@pytest.mark.slow
def test_eval_of_a_checkpoint_and_of_the_model_name_their_steps(folder, cli):
    cli("train", "run.toml", "--plain", "--set", "training.minibatches=2", code=0)
    for target, steps in (("runs/run", 4), ("runs/run/checkpoints/step-000002", 2)):
        assert json.loads(cli("eval", target, "--json").stdout)["step"] == steps


FULL = """
from retrain.cli.main import main

sys.argv[0] = "retrain"
fill()
main()
"""


@pytest.mark.parametrize("kept", [True, False])
def test_an_export_to_a_full_disk_ends_with_6_and_leaves_the_export_that_is_there(run, folder, cli, kept):
    def content():
        return {path.relative_to(folder): path.is_file() and path.read_bytes() for path in folder.rglob("*")}

    if kept:
        assert cli("export", str(run), "exported").exit_code == 0
    before = content()
    assert (folder / "exported").exists() == kept
    done = run_script(FULL, "export", run, "exported", code=6)
    assert "cannot be written: " in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr
    assert content() == before


@pytest.mark.slow
def test_no_progress_bar_of_a_library_reaches_the_output(folder):
    done = run_command(
        "train", "run.toml", "--set", "warmup.warmup_steps=1", "--set", "logging.findings=false", cwd=folder, code=0
    )
    assert done.stderr == ""
    assert "\r" not in done.stdout
    assert run_command("export", "runs/run", "out", cwd=folder).stderr == ""


def test_fresh_and_resume_exclude_each_other(run, cli):
    result = cli("train", "run.toml", "--plain", "--fresh", "--resume", "auto", code=2)
    assert "drop one of the two" in result.stderr
    assert (run / "model").is_dir()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (("--serve", "8000"), "write it as 127.0.0.1:8000"),
        (("--serve", "127.0.0.1:0", "--api-key-env", "NO_SUCH_KEY"), "NO_SUCH_KEY is not set"),
    ],
)
def test_an_endpoint_that_cannot_be_is_refused_before_anything_is_loaded(run, cli, options, why):
    refused = cli("train", "run.toml", *options)
    assert (refused.exit_code, why in " ".join(refused.output.split())) == (2, True), refused.output


def test_sample_completes_prompts_from_the_command_line_or_the_input(run, cli):
    given = cli("sample", str(run), "12+34?\\n", "-n", "2", "--temperature", "0", code=0)
    first, second = given.stdout.split("\n\n")[:2]
    assert first == second, "greedy completions of one prompt are equal"
    typed = cli("sample", str(run), "--temperature", "0", input="12+34?\n")
    assert typed.stdout.split("\n\n")[0] == first
    chat = cli("sample", str(run), '[{"role": "user", "content": "12+34?"}]')
    assert (chat.exit_code, "there is no chat template" in chat.output) == (3, True), "JSON is taken as messages"


def test_export_report_and_status(run, cli, folder):
    assert cli("export", str(run), "exported").exit_code == 0
    assert (folder / "exported" / "model.safetensors").read_bytes() == (
        run / "model" / "model.safetensors"
    ).read_bytes()
    assert not (run / "model/chat_template.jinja").exists(), "the run itself samples plain texts"
    exported = AutoTokenizer.from_pretrained(folder / "exported")
    asked = [{"role": "user", "content": "12+34?\n"}, {"role": "assistant", "content": "46"}]
    ids = exported.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert ids == exported("12+34?\n46")["input_ids"]
    assert cli("report", str(run)).exit_code == 0
    assert "<svg" in (run / "report.html").read_text()
    status = json.loads(cli("status", "--json").stdout)
    assert [row["state"] for row in status] == ["finished"]
    assert "finished" in cli("status", str(run)).stdout


@pytest.mark.parametrize("command", ["eval", "sample", "report", "status"])
def test_commands_on_a_path_that_is_no_run_say_so(folder, cli, command):
    result = cli(command, "nowhere", code=2)
    assert "nowhere" in result.output


def test_resume_after_a_stop_finishes_the_run(folder, cli):
    assert cli("train", "run.toml", "--plain", "--set", "training.max_steps=2").exit_code == 0
    refused = cli("train", "run.toml", "--plain", "--resume", "auto", code=2)
    assert "training.max_steps: differs" in refused.output
    cli("train", "run.toml", "--plain", "--resume", "auto", "--allow-change", "training.max_steps", code=0)
    assert len((folder / "runs/run/metrics.jsonl").read_text().splitlines()) == 4


def test_a_read_only_run_directory_is_refused_before_anything_is_loaded(folder, cli):
    (folder / "file").write_text("not a directory")
    cli("train", "run.toml", "--plain", "--set", "logging.dir=file", code=6)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("train", "run.toml"), 2),
        (("train", "run.toml", "--resume", "auto", "--set", "training.lr=0.5"), 2),
        (("train", "run.toml", "--resume", "elsewhere/checkpoints/step-000001"), 2),
        (("train", "run.toml", "--set", "logging.dir=run.toml"), 6),
        (("eval", "nowhere"), 2),
    ],
)
def test_what_is_refused_is_refused_before_torch_is_imported(run, folder, arguments, code):
    text = (
        "import sys\nsys.modules['torch'] = None\nfrom retrain.cli.main import app\n"
        f"app({list(arguments)!r}, standalone_mode=True)\n"
    )
    done = subprocess.run([sys.executable, "-c", text], cwd=folder, capture_output=True, text=True)
    assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr


FATAL = """
import os, signal
from pathlib import Path

def fatal(completion):
    metrics = Path("runs/killed/metrics.jsonl")
    if Path("armed").exists() and metrics.exists() and metrics.read_text().count("\\n") == 3:
        os.kill(os.getpid(), signal.SIGKILL)
    return float(len(completion) % 2)
"""


@pytest.mark.slow
def test_a_killed_run_is_resumed_to_the_same_bits_by_a_process_with_other_hashes(tmp_path):
    (tmp_path / "fatal.py").write_text(FATAL)
    (tmp_path / "run.toml").write_text(
        TOML.replace("steps = 12", "steps = 0") + '\n[[rewards]]\nname = "fatal.fatal"\n'
    )
    whole, killed = (tmp_path / "runs" / name for name in ("whole", "killed"))
    arguments = ("train", "run.toml", "--plain", "--resume", "auto", "--set")
    assert run_command(*arguments, "logging.name=whole", cwd=tmp_path).returncode == 0
    (tmp_path / "armed").touch()
    assert run_command(*arguments, "logging.name=killed", cwd=tmp_path).returncode == -signal.SIGKILL
    assert not (killed / "model").exists()
    (tmp_path / "armed").unlink()
    real = [str(Path(sys.executable).with_name("retrain")), *arguments, "logging.name=killed"]  # forks share the hashes
    done = subprocess.run(real, cwd=tmp_path, capture_output=True, text=True)
    assert "resumed after step 2" in done.stdout, done.stdout + done.stderr
    assert digest(killed) == digest(whole)
    for name in ("metrics.jsonl", "eval.jsonl"):
        assert rows(killed / name) == rows(whole / name)
