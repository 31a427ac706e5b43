"""Results of other programs: tables, charts of Weights & Biases, and the metric files of trainers."""

import json
from types import SimpleNamespace

import pytest

from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict import comparison, sentences, verdict_page
from retrain.campaign.verdict.result_files import tables_of_rows
from retrain.campaign.verdict.result_rows import only_metric, rows_of_files
from retrain.errors import ConfigError, DataError

SEEDS = range(6)
RESULTS = {"grpo": [0.50, 0.52, 0.49, 0.51, 0.50, 0.53], "dapo": [0.56, 0.57, 0.56, 0.58, 0.55, 0.58]}


def read(files, metric=None):
    """The tables of the files by task."""
    rows = rows_of_files(files)
    found = tables_of_rows(rows, Outcome(metric=metric or only_metric(rows)))
    return {table.task: table for table in found}


def compare(paths, metric=None, **more):
    """The analysis of the files with its outputs."""
    found = comparison.compare(paths, comparison.Asked(metric=metric, **more))
    return SimpleNamespace(
        facts=sentences.as_json(found),
        text=verdict_page.text(found),
        latex=lambda: verdict_page.paper(found),
        page=lambda: verdict_page.render(found, ["retrain compare"]),
    )


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
    assert f"+0.058 {one['metric']}, 95% CI [" in one["sentence"]
    assert "+0.058 [" in found.text
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
    pooled, first, second = found.facts["comparisons"]
    assert (pooled["task"], pooled["seeds"], pooled["family"]) == ("all tasks", list(range(5)), "pooled")
    assert (first["task"], first["seeds"], first["corrected"]) == ("gsm8k", list(SEEDS), 2 / 2**6)
    assert (second["task"], second["seeds"], second["left_out"]) == ("math", list(range(5)), [5])
    assert "no result: math, dapo seed 5 missing: it is in no file" in found.text
    assert "Premises" not in found.page()


def test_a_blank_result_is_no_zero(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,0.5\na,1,\nb,0,nan\nb,1,0.5\n")
    cells = read([file])[""].cells
    assert [cell.status for cell in cells.values()] == ["done", "failed", "failed", "done"]
    assert cells["a", 1].reason == f"accuracy is blank in {file}:3"
    assert cells["b", 0].reason == f"accuracy is nan in {file}:4"


def curves(method, seed, steps, value=None):
    """Rows of a table in which a run of dapo is better by 0.05 at every step."""
    value = value or (lambda step: (0.5 + 0.05 * (method == "dapo") + seed / 100) * (1 + step) / 100)
    return [f"{method},{seed},{step},{value(step)}" for step in steps]


def steps_table(tmp_path, rows):
    return write(tmp_path / "t.csv", "\n".join(["method,seed,step,accuracy", *rows]))


def test_a_condition_without_steps_has_no_curve(tmp_path):
    stepped = [row for method in ("grpo", "dapo") for seed in SEEDS for row in curves(method, seed, (0, 10))]
    alone = ["method,seed,accuracy", *(f"gspo,{seed},0.{seed + 1}" for seed in SEEDS)]
    files = [steps_table(tmp_path, stepped), write(tmp_path / "alone.csv", "\n".join(alone))]
    drawn = compare(files).page().partition("Learning curves")[2]
    assert {name for name in ("c0", "c1", "c2") if f'class="curve {name}"' in drawn} == {"c0", "c1"}
    other = write(tmp_path / "other.csv", "\n".join(alone).replace("gspo", "other"))
    assert "Learning curves" not in compare([files[1], other]).page()


def test_runs_of_different_lengths_are_compared_at_a_common_step(tmp_path):
    lengths = {("dapo", seed): 60 for seed in SEEDS} | {("dapo", 3): 10}
    rows = [
        row
        for method in RESULTS
        for seed in SEEDS
        for row in curves(method, seed, range(0, lengths.get((method, seed), 100) + 1, 10))
    ]
    found = compare([steps_table(tmp_path, rows)])
    note = (
        "Runs differ in length and are compared at step 10. Shortest: dapo seed 3 to step 10. Longer, with later "
        "values that are not used: grpo to step 100, 5 runs of dapo to step 60. "
        "Without dapo seed 3 it would be step 60."
    )
    assert "All 12 runs have a result." in found.text
    assert "finished" not in found.text
    assert found.text.count(note) == found.page().count(note) == found.latex().count(note) == 1
    (one,) = found.facts["comparisons"]
    assert (found.facts["steps_note"], one["verdict"], one["left_out"]) == (note, "better", [])
    assert one["difference"]["value"] == pytest.approx(0.05 * 11 / 100)
    without = [row for row in rows if not row.startswith("dapo,3,")]
    found = compare([steps_table(tmp_path, without)])
    assert "compared at step 60. Shortest: dapo to step 60. Longer, with later values" in found.text
    assert "not used: grpo to step 100.\n" in found.text + "\n"


def test_runs_measured_at_other_steps_use_their_last_value_before(tmp_path):
    rows = [row for seed in SEEDS for row in curves("grpo", seed, (10, 30, 57, 70, 90))]
    rows += [row for seed in SEEDS for row in curves("dapo", seed, (20, 40, 60))]
    found = read([steps_table(tmp_path, rows)])
    assert {cell.condition: cell.curve[-1][0] for cell in found[""].runs} == {"grpo": 57, "dapo": 60}
    assert "compared at step 60. Shortest: dapo to step 60." in found[""].steps_note
    assert found[""].steps_note.endswith("The values of grpo are of step 57.")


@pytest.mark.parametrize("steps", [(100,), (0, 100), (0, 50, 100)])
def test_runs_without_common_steps_are_refused(tmp_path, steps):
    rows = [*curves("grpo", 0, steps), *curves("dapo", 0, (0, 30, 60))]
    with pytest.raises(DataError, match=r"grpo seed 0 was measured at .*, but not between 54 and 60, the last step of"):
        read([steps_table(tmp_path, rows)])


@pytest.mark.parametrize("gap", ["", "null", "NaN", " ", "NA"])
def test_steps_without_evaluation_are_skipped(tmp_path, gap):
    rows = [f"{step},0.1,{gap if step % 10 else step / 100}" for step in range(1, 31 if gap == "NaN" else 36)]
    file = write(tmp_path / "grpo-s0.csv", "\n".join(["step,loss,accuracy", *rows]))
    (cell,) = read([file])[""].runs
    assert cell.curve == ((10, 0.1), (20, 0.2), (30, 0.3))


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        (("0.5", "0.6", "nan"), "accuracy is nan in"),
        (("0.5", "0.6", ""), "accuracy is blank in"),
        (("", "", ""), "accuracy is blank in"),
        (("nan", "0.6", "0.7"), ""),
    ],
)
def test_a_run_whose_last_value_is_missing_has_no_result(tmp_path, values, reason):
    rows = [f"a,0,{step},{value}" for step, value in enumerate(values)]
    cells = read([steps_table(tmp_path, [*rows, "b,0,1,0.5", "c,0,1,0.5"])])[""].runs
    assert cells[0].reason.startswith(reason)
    assert bool(cells[0].reason) is bool(reason)


def test_no_run_with_a_result_is_an_error(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,\nb,0,nan\n")
    with pytest.raises(DataError, match=r"no run has a result: a seed 0: accuracy is blank in .*t.csv:2; b seed 0"):
        read([file])


def test_two_files_of_one_run_are_refused(tmp_path):
    first = write(tmp_path / "grpo-s0.jsonl", lines([{"step": 1, "accuracy": 0.5}]))
    other = write(tmp_path / "grpo_seed0" / "metrics.jsonl", lines([{"step": 2, "accuracy": 0.5}]))
    with pytest.raises(DataError, match=f"{first} and {other} both have the results of grpo, seed 0"):
        read([first, other])
    chart = write(tmp_path / "w.csv", "Step,a-s0 - acc,a_seed0 - acc\n1,0.5,\n2,,0.5\n")
    with pytest.raises(DataError, match=r"the run 'a-s0' and .* the run 'a_seed0' both have the results of a, seed 0"):
        read([chart])


@pytest.mark.parametrize("separator", [";", "\t", "|"])
def test_the_separator_of_columns_is_found(tmp_path, separator):
    text = "method,seed,acc\na,0,0.5\n".replace(",", separator)
    assert read([write(tmp_path / "t.csv", text)])[""].runs[0].result == 0.5


@pytest.mark.parametrize("axis", ["Step", "epoch"])
def test_a_chart_may_have_another_axis(tmp_path, axis):
    text = f'"{axis}","a-s0 - eval/acc","a-s0 - eval/acc__MIN","a-s0 - {axis}"\n1,0.5,0.4,1\n2,0.6,0.5,2\n'
    found = read([write(tmp_path / "w.csv", text)])
    assert found[""].outcome.metric == "eval/acc"
    assert found[""].runs[0].curve == ((1, 0.5), (2, 0.6))


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "method,seed,accuracy\na,0,0.5\na,0,0.6\n", r"t.csv:3: a, seed 0, was measured before, in .*t.csv:2"),
        ("t.csv", "method,seed,accuracy\na,0,1\na,1,high\n", r"t.csv:3: accuracy is 'high', which is not a number"),
        ("t.csv", "when,what\n1,2\n", r"t.csv:2: neither method and seed nor a step; it has when, what"),
        ("a-s0.json", "{}", r'a-s0.json: no list "log_history"'),
        (
            "t.csv",
            "method,seed,x\na,0,1e15\na,1,-1e308\n",
            r"t.csv:3: x is -1e308, larger in magnitude than 1e\+15; fix",
        ),
        ("t.csv", "method,seed,accuracy\na,0,40.1%\n", r"t.csv:2: accuracy is '40.1%', .*; write a number as 0.40"),
        (
            "t.csv",
            'method,seed,x\na,0,"0,40"\n',
            r"t.csv:2: x is '0,40', which is not a number; write a number as 0.40",
        ),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, text, message):
    (tmp_path / "runs").mkdir()
    with pytest.raises(DataError, match=message):
        read([write(tmp_path / "runs" / name, text)])


def test_several_metrics_are_listed(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,bleu,rouge\na,0,0.5,0.6\n")
    with pytest.raises(ConfigError, match="several metrics: bleu, rouge"):
        read([file])
    with pytest.raises(DataError, match="no row has 'f1'; metrics that rows have: bleu, rouge"):
        read([file], "f1")


def test_runs_and_files_are_not_mixed(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,0.5\n")
    with pytest.raises(ConfigError, match="not a file, but other paths are"):
        compare([file, tmp_path])
    for paths in ([tmp_path / "no.csv"], [file, tmp_path / "no.csv"]):
        with pytest.raises(ConfigError, match=r"no.csv: RUNS: does not exist; check the path"):
            compare(paths)


def of_problems(tmp_path, seeds, wrong=range(30)):
    """a and b on 200 problems; b solves those that a does not."""
    rows = [
        f"{method},{seed},{problem},{int(method == 'b' or problem not in wrong)}"
        for method in "ab"
        for seed in seeds
        for problem in range(200)
    ]
    return write(tmp_path / "p.csv", "\n".join(["method,seed,problem,correct", *rows]))


def test_one_run_of_each_method_is_compared_problem_by_problem(tmp_path):
    found = compare([of_problems(tmp_path, [0])])
    (one,) = found.facts["comparisons"]
    assert (one["test"], one["p"], one["verdict"]) == ("McNemar", 2 / 2**30, "better (McNemar)")
    assert one["difference"]["value"] == pytest.approx(0.15)
    assert "of these two models, not of the methods" in one["sentence"]
    several = compare([of_problems(tmp_path, range(6))])
    assert several.facts["comparisons"][0]["test"] == "exact", "a run of many problems is one observation"


def test_runs_without_a_common_seed_are_permuted_if_asked(tmp_path):
    rows = [f"a,{seed},{0.5 + seed / 100}\nb,{seed + 100},{0.6 + seed / 100}" for seed in range(4)]
    file = write(tmp_path / "t.csv", "\n".join(["method,seed,accuracy", *rows]))
    assert "give --unpaired" in compare([file]).text
    (one,) = compare([file], unpaired=True).facts["comparisons"]
    assert (one["p"], one["verdict"]) == (2 / 70, "better")
    assert "4 runs, not paired" in one["sentence"]


@pytest.mark.parametrize(
    "name",
    [
        *("eval_loss", "val/perplexity", "mean_length", "policy/entropy", "wer", "time/step_s"),
    ],
)
def test_a_metric_whose_direction_is_open_needs_a_goal(tmp_path, name):
    rows = [f"{method},{seed},{value + seed / 100}" for method, value in (("a", 2.0), ("b", 2.5)) for seed in SEEDS]
    file = write(tmp_path / "t.csv", "\n".join([f"method,seed,{name}", *rows]))
    with pytest.raises(ConfigError, match=r"add --goal min if a smaller .* is better, or --goal max"):
        compare([file])
    (one,) = compare([file], goal="min").facts["comparisons"]
    assert one["verdict"] == "worse"
    assert "smaller is better" in one["sentence"]
    assert compare([file], goal="max").facts["comparisons"][0]["verdict"] == "better"


def test_the_mean_of_a_curve_can_be_the_result(tmp_path):
    rows = [row for method in RESULTS for seed in SEEDS for row in curves(method, seed, (0, 50, 99))]
    last, mean = (compare([steps_table(tmp_path, rows)], summary=one).facts for one in ("last", "mean"))
    assert last["comparisons"][0]["difference"]["value"] == pytest.approx(0.05)
    assert mean["comparisons"][0]["difference"]["value"] == pytest.approx(0.05 * (1 + 51 + 100) / 300)


TABLE = "method,seed,accuracy\ngrpo,0,0.4\ngrpo,1,0.5\ncafé,0,0.6\ncafé,1,0.7\n"


@pytest.mark.parametrize(
    "written",
    [
        TABLE.encode("utf-16"),
        TABLE.replace("\n", "\r").encode(),
        TABLE.replace("café,1", "cafe\u0301,1").encode(),
        TABLE.replace("café,1", '" café\n",1').encode(),
    ],
    ids=["UTF-16", "carriage returns", "NFD", "line end in a name"],
)
def test_a_table_may_be_written_in_several_ways(tmp_path, written):
    (tmp_path / "results.csv").write_bytes(written)
    assert {(row.method, row.seed) for row in rows_of_files([tmp_path / "results.csv"])} == {
        ("grpo", 0), ("grpo", 1), ("café", 0), ("café", 1)
    }  # fmt: skip
