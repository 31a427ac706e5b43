"""Results of other programs: tables, charts of Weights & Biases, and the metric files of trainers."""

import json

import pytest

from retrain.campaign.verdict.comparison import compare
from retrain.campaign.verdict.result_files import read_result_files
from retrain.errors import ConfigError, DataError

SEEDS = range(6)
RESULTS = {"grpo": [0.50, 0.52, 0.49, 0.51, 0.50, 0.53], "dapo": [0.56, 0.57, 0.56, 0.58, 0.55, 0.58]}


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def table(tmp_path):
    rows = [f"{method},{seed},{RESULTS[method][seed]}" for method in RESULTS for seed in SEEDS]
    return [write(tmp_path / "table.csv", "\n".join(["method,seed,accuracy", *rows]))]


def table_of_steps(tmp_path):
    rows = [
        {"condition": method, "seed": seed, "step": step, "score": RESULTS[method][seed] * step / 20, "loss": "low"}
        for step in (20, 10)
        for method in RESULTS
        for seed in SEEDS
    ]
    return [write(tmp_path / "table.jsonl", lines(rows))]


def chart(tmp_path):
    runs = [(f"{method}-s{seed}", RESULTS[method][seed]) for method in RESULTS for seed in SEEDS]
    head = ",".join(f'"{name} - eval/acc{end}"' for name, _ in runs for end in ("", "__MIN", "__MAX"))
    rows = [f"{step}," + ",".join(f'"{value * step / 20}"' for _, value in runs for _ in range(3)) for step in (10, 20)]
    return [write(tmp_path / "wandb.csv", f'"Step",{head}\n' + "\n".join(rows))]


def trainer_states(tmp_path):
    """What TRL's GRPOTrainer leaves in a checkpoint: training and evaluation in turn."""
    files = []
    for method in RESULTS:
        for seed in SEEDS:
            history = [{"epoch": 1.0, "step": 10, "loss": 0.1, "reward": 0.2, "rewards/right/mean": 0.2}]
            history += [{"epoch": 1.0, "step": 10, "eval_reward": RESULTS[method][seed] / 2}]
            history += [{"epoch": 2.0, "step": 20, "eval_reward": RESULTS[method][seed]}]
            place = tmp_path / "out" / f"{method}_seed{seed}" / "checkpoint-20" / "trainer_state.json"
            files.append(write(place, json.dumps({"global_step": 20, "log_history": history})))
    return files


def verl_files(tmp_path):
    files = []
    for method in RESULTS:
        for seed in SEEDS:
            rows = [
                {"step": step, "elapsed_seconds": 1.5, "data": {"val-core/acc": RESULTS[method][seed] * step / 20}}
                for step in (0, 20)
            ]
            rows.insert(1, {"step": 10, "elapsed_seconds": 1.0, "data": {"actor/loss": 0.1}})
            files.append(write(tmp_path / "verl" / f"{method}-{seed}" / "metrics.jsonl", lines(rows)))
    return files


def prime_files(tmp_path):
    files = []
    for method in RESULTS:
        for seed in SEEDS:
            rows = [{"step": step, "time": 1e9 + step, "loss/mean": 0.1} for step in (0, 10, 20)]
            rows[-1]["eval/gsm8k/all/avg@1"] = RESULTS[method][seed]
            files.append(write(tmp_path / "prime" / f"{method}.s{seed}.jsonl", lines(rows)))
    return [file.rename(file.with_name(file.name.replace(".s", "-s"))) for file in files]


@pytest.mark.parametrize(
    ("written", "metric"),
    [
        (table, None),
        (table_of_steps, None),
        (chart, None),
        (trainer_states, "eval_reward"),
        (verl_files, "val-core/acc"),
        (prime_files, "eval/gsm8k/all/avg@1"),
    ],
)
def test_every_format_gives_the_same_verdict(tmp_path, written, metric):
    found = compare(written(tmp_path), metric)
    (one,) = found.facts["comparisons"]
    assert (one["condition"], one["against"], one["seeds"]) == ("dapo", "grpo", list(SEEDS))
    assert one["difference"]["value"] == pytest.approx(0.35 / 6)
    assert one["p"] == 2 / 2**6
    assert one["verdict"] == "better"
    assert f"+0.058 {one['metric']}, 95% CI [" in found.text
    assert "dapo against grpo" in found.page()


def test_tasks_are_one_family_and_what_no_file_has_is_missing(tmp_path):
    rows = [
        f"{task},{method},{seed},{RESULTS[method][seed] + 0.1 * (task == 'math')}"
        for task in ("gsm8k", "math")
        for method in RESULTS
        for seed in SEEDS
        if (task, method, seed) != ("math", "dapo", 5)
    ]
    found = compare([write(tmp_path / "t.csv", "\n".join(["task,method,seed,accuracy", *rows]))])
    first, second = found.facts["comparisons"]
    assert (first["task"], first["seeds"], first["holm"]) == ("gsm8k", list(SEEDS), 2 * 2 / 2**6)
    assert (second["task"], second["seeds"], second["left_out"]) == ("math", list(range(5)), [5])
    assert "No result: math, dapo seed 5 missing: it is in no file." in found.text
    assert "Premises" not in found.page()


def test_values_beyond_0_and_1_are_no_shares(tmp_path):
    rows = [f"{method},{seed},{100 * value}" for method in RESULTS for seed, value in enumerate(RESULTS[method])]
    found = compare([write(tmp_path / "t.csv", "\n".join(["method,seed,return", *rows]))])
    assert "+5.833 return, 95% CI [" in found.text
    assert "5000%" not in found.page()


def test_a_blank_result_is_no_zero(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,0.5\na,1,\nb,0,nan\nb,1,0.5\n")
    cells = {(cell.condition, cell.seed): cell for cell in read_result_files([file]).cells[""]}
    assert [cell.status for cell in cells.values()] == ["done", "failed", "failed", "done"]
    assert cells["a", 1].reason == f"accuracy is nan in {file}:3"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "method,seed,accuracy\na,0,0.5\na,0,0.6\n", r"t.csv:3: a, seed 0, was measured at step 0 before"),
        ("t.csv", "method,seed,accuracy\na,0,1\na,1,high\n", r"t.csv:3: accuracy is 'high', which is not a number"),
        ("t.csv", "method,seed,accuracy\na,zero,0.5\n", r't.csv:2: seed is "zero", which is not an integer'),
        ("t.csv", "method,seed,accuracy\na,0\n", r"t.csv:2: 2 values for 3 columns"),
        ("t.csv", "method,method,accuracy\na,0,1\n", r"t.csv:1: two columns have the same name"),
        ("t.csv", "method,seed\na,0\n", r"t.csv:2: no row has a metric"),
        ("t.csv", "", r"t.csv: no rows"),
        ("t.csv", "when,what\n1,2\n", r"t.csv:2: neither method and seed nor a step; it has when, what"),
        ("a-s0.json", "{}", r'a-s0.json: no list "log_history"'),
        ("a-s0.json", "{", r"a-s0.json: "),
        ("a-s0.jsonl", '{"step": 0, "x": 1}\n[1]\n', r"a-s0.jsonl:2: not an object"),
        ("a-s0.jsonl", '{"step": 0, "x": 1, "x": 2}\n', r"two fields are called"),
        ("a.jsonl", '{"step": 0, "x": 1}\n', r"does not end with a seed; rename it as in grpo-s3"),
        ("w.csv", "Step,run - acc\n1,0.5\n", r"w.csv: the run 'run': the name 'run' does not end with a seed"),
        ("t.csv", "method,seed,accuracy\na,1e400,0.5\n", r"seed is .* not an integer"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / "runs").mkdir()
    with pytest.raises(DataError, match=message):
        read_result_files([write(tmp_path / "runs" / name, text)])


def test_several_metrics_are_listed(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,bleu,rouge\na,0,0.5,0.6\n")
    with pytest.raises(ConfigError, match="several metrics: bleu, rouge"):
        read_result_files([file])
    with pytest.raises(DataError, match="no row has 'f1'; metrics that rows have: bleu, rouge"):
        read_result_files([file], "f1")


def test_runs_and_files_are_not_mixed(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,0.5\n")
    with pytest.raises(ConfigError, match="not a file, but other paths are"):
        compare([file, tmp_path])
    with pytest.raises(ConfigError, match="the result of a run is its held-out accuracy"):
        compare([tmp_path], "loss")
