"""Files of results: what is read, what is refused with file and line, and at which step runs are compared."""

import json
from types import SimpleNamespace

import pytest

from retrain.campaign import comparison
from retrain.campaign.plan.outcome import Outcome
from retrain.campaign.verdict import sentences, verdict_page
from retrain.campaign.verdict.results_file import only_metric, read_results_file
from retrain.campaign.verdict.runs_of_file import runs_of_file
from retrain.errors import ConfigError, DataError

SEEDS = range(6)
RESULTS = {"grpo": [0.50, 0.52, 0.49, 0.51, 0.50, 0.53], "dapo": [0.56, 0.57, 0.56, 0.58, 0.55, 0.58]}
ROWS = [{"method": method, "seed": seed, "accuracy": RESULTS[method][seed]} for method in RESULTS for seed in SEEDS]


def read(file, metric=None, **more):
    """The results in a file by task."""
    rows = read_results_file(file)
    return {one.task: one for one in runs_of_file(file, rows, Outcome(metric=metric or only_metric(rows), **more))}


def compare(file, metric=None, **more):
    """The analysis of a file with its outputs."""
    found = comparison.compare([file], comparison.Asked(metric=metric, **more))
    return SimpleNamespace(
        facts=sentences.as_json(found),
        text=verdict_page.text(found),
        latex=verdict_page.paper(found),
        page=verdict_page.render(found, ["retrain compare"]),
    )


def write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    return path


def csv_of(rows, separator=","):
    return "\n".join(separator.join(map(str, values)) for values in ([*rows[0]], *(row.values() for row in rows)))


def json_lines(rows):
    return "".join(json.dumps(row) + "\n" for row in rows)


def with_steps(rows):
    return [row | {"step": step, "accuracy": row["accuracy"] * step / 20} for step in (10, 20) for row in rows]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("t.csv", csv_of(ROWS)),
        ("t.tsv", csv_of(ROWS, "\t")),
        ("t.csv", csv_of(ROWS, ";")),
        ("t.csv", csv_of(ROWS).replace("method", "Condition").replace("\n", "\r")),
        ("t.jsonl", json_lines([row | {"loss": "low", "nested": {"a": 1}} for row in ROWS])),
        ("t.jsonl", json_lines(with_steps(ROWS))),
        ("t.parquet", ""),
    ],
    ids=["CSV", "TSV", "semicolons", "carriage returns", "JSON lines", "steps", "Parquet"],
)
def test_every_format_gives_the_same_verdict(tmp_path, name, text):
    file = write(tmp_path / name, text)
    if not text:
        import pyarrow as arrow
        from pyarrow import parquet

        parquet.write_table(arrow.Table.from_pylist(ROWS), file)
    found = compare(file)
    (one,) = found.facts["comparisons"]
    assert (one["condition"], one["against"], one["seeds"]) == ("dapo", "grpo", list(SEEDS))
    assert one["difference"]["value"] == pytest.approx(0.35 / 6)
    assert (one["p"], one["verdict"]) == (2 / 2**6, "better")
    assert "+0.058 accuracy (more is better), 95% CI [" in one["sentence"]
    assert "+0.058 [" in found.text
    assert "dapo against grpo" in found.page


def test_tasks_are_one_family_and_a_run_without_a_row_is_missing(tmp_path):
    rows = [
        {"task": task, **row, "accuracy": row["accuracy"] + 0.1 * (task == "math")}
        for task in ("gsm8k", "math")
        for row in ROWS
        if (task, row["method"], row["seed"]) != ("math", "dapo", 5)
    ]
    found = compare(write(tmp_path / "t.csv", csv_of(rows)))
    pooled, first, second = found.facts["comparisons"]
    assert (pooled["task"], pooled["seeds"], pooled["family"]) == ("all tasks", list(range(5)), "pooled")
    assert (first["task"], first["seeds"], first["corrected"]) == ("gsm8k", list(SEEDS), 2 / 2**6)
    assert (second["task"], second["seeds"], second["left_out"]) == ("math", list(range(5)), [5])
    assert "no result: math, dapo seed 5 missing: the file has no row of it" in found.text


def test_a_blank_result_is_no_zero(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,accuracy\na,0,0.5\na,1,\nb,0,nan\nb,1,0.5\n")
    cells = read(file)[""].cells
    assert [cell.status for cell in cells.values()] == ["done", "failed", "failed", "done"]
    assert cells["a", 1].reason == f"accuracy is blank in {file}:3"
    assert cells["b", 0].reason == f"accuracy is nan in {file}:4"


def curve(method, seed, steps):
    """Rows of a run; dapo is better by 0.05 at the last step."""
    level = 0.5 + 0.05 * (method == "dapo") + seed / 100
    return [f"{method},{seed},{step},{level * (1 + step) / 100}" for step in steps]


def file_of_steps(tmp_path, rows):
    return write(tmp_path / "t.csv", "\n".join(["method,seed,step,accuracy", *rows]))


def test_a_condition_without_steps_has_no_curve(tmp_path):
    rows = [row for method in ("grpo", "dapo") for seed in SEEDS for row in curve(method, seed, (0, 10))]
    rows += [f"gspo,{seed},,0.{seed + 1}" for seed in SEEDS]
    drawn = compare(file_of_steps(tmp_path, rows)).page.partition("Learning curves")[2]
    assert {name for name in ("c0", "c1", "c2") if f'class="curve {name}"' in drawn} == {"c0", "c1"}


def test_runs_of_different_lengths_are_compared_at_a_common_step(tmp_path):
    lengths = {("dapo", seed): 60 for seed in SEEDS} | {("dapo", 3): 10}
    rows = [
        row
        for method in RESULTS
        for seed in SEEDS
        for row in curve(method, seed, range(0, lengths.get((method, seed), 100) + 1, 10))
    ]
    found = compare(file_of_steps(tmp_path, rows))
    note = (
        "Runs differ in length and are compared at step 10. Shortest: dapo seed 3 to step 10. Longer, with later "
        "values that are not used: grpo to step 100, 5 runs of dapo to step 60. "
        "Without dapo seed 3 it would be step 60."
    )
    assert "All 12 runs have a result." in found.text
    assert found.text.count(note) == found.page.count(note) == found.latex.count(note) == 1
    (one,) = found.facts["comparisons"]
    assert (found.facts["steps_note"], one["verdict"], one["left_out"]) == (note, "better", [])
    assert one["difference"]["value"] == pytest.approx(0.05 * 11 / 100)
    without = [row for row in rows if not row.startswith("dapo,3,")]
    found = compare(file_of_steps(tmp_path, without))
    assert "compared at step 60. Shortest: dapo to step 60. Longer, with later values" in found.text
    assert "not used: grpo to step 100.\n" in found.text + "\n"


def test_runs_measured_at_other_steps_use_their_last_value_before(tmp_path):
    rows = [row for seed in SEEDS for row in curve("grpo", seed, (10, 30, 57, 70, 90))]
    rows += [row for seed in SEEDS for row in curve("dapo", seed, (20, 40, 60))]
    (found,) = read(file_of_steps(tmp_path, rows)).values()
    assert {cell.condition: cell.curve[-1][0] for cell in found.runs} == {"grpo": 57, "dapo": 60}
    assert "compared at step 60. Shortest: dapo to step 60." in found.steps_note
    assert found.steps_note.endswith("The values of grpo are of step 57.")


def test_an_evaluation_that_all_runs_share_is_preferred(tmp_path):
    rows = [*curve("grpo", 0, range(0, 101, 10)), *curve("dapo", 0, [*range(0, 61, 10), 64])]
    (found,) = read(file_of_steps(tmp_path, rows)).values()
    assert {cell.curve[-1][0] for cell in found.runs} == {60}
    assert "compared at step 60. Shortest: dapo seed 0 to step 64." in found.steps_note


@pytest.mark.parametrize("steps", [(100,), (0, 100), (0, 50, 100)])
def test_runs_without_common_steps_are_refused(tmp_path, steps):
    rows = [*curve("grpo", 0, steps), *curve("dapo", 0, (0, 30, 60))]
    with pytest.raises(DataError, match=r"grpo seed 0 was measured at .*, but not between 54 and 60, the last step of"):
        read(file_of_steps(tmp_path, rows))


@pytest.mark.parametrize("gap", ["", "null", "NaN", " ", "NA"])
def test_steps_without_evaluation_are_skipped(tmp_path, gap):
    rows = [f"grpo,0,{step},{gap if step % 10 else step / 100}" for step in range(1, 31 if gap == "NaN" else 36)]
    (cell,) = read(file_of_steps(tmp_path, rows))[""].runs
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
    cells = read(file_of_steps(tmp_path, [*rows, "b,0,1,0.5", "c,0,1,0.5"]))[""].runs
    assert cells[0].reason.startswith(reason)
    assert bool(cells[0].reason) is bool(reason)


HEAD = "method,seed,accuracy\n"


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", f"{HEAD}a,0,\nb,0,nan\n", r"no run has a result: a seed 0: accuracy is blank in .*t.csv:2; b seed 0"),
        ("t.csv", f"{HEAD}a,0,0.5\na,0,0.6\n", r"t.csv:3: a, seed 0, was measured before, in .*t.csv:2"),
        ("t.csv", f"{HEAD}a,0,1\na,1,high\n", r"t.csv:3: accuracy is 'high', which is not a number"),
        ("t.csv", f"{HEAD}a,0,40.1%\n", r"t.csv:2: accuracy is '40.1%', .*; write a number as 0.40"),
        ("t.csv", f'{HEAD}a,0,"0,40"\n', r"t.csv:2: accuracy is '0,40', which is not a number; write a number as 0.40"),
        ("t.csv", "when,what\n1,2\n", r"t.csv:2: no column method; it has when, what: docs/compare.md has recipes"),
        ("t.csv", "method,seed,x\na,0,1\na,1,-1e308\n", r"t.csv:3: x is -1e308, larger in magnitude than 1e\+15; fix"),
        ("t.csv", f"{HEAD}a,0.5,1\n", r't.csv:2: seed is "0.5", which is not an integer'),
        ("trainer_state.json", "{}", r"trainer_state.json: not a table of results: .* docs/compare.md has recipes"),
        ("log.jsonl", '{"step": 1, "data": {"acc": 0.1}}\n', r"log.jsonl:1: no column method; it has step, data"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_with_its_line(tmp_path, name, text, message):
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, text), None if "x" in text else "accuracy", goal="max")


def test_several_metrics_are_listed(tmp_path):
    file = write(tmp_path / "t.csv", "method,seed,bleu,rouge\na,0,0.5,0.6\n")
    with pytest.raises(ConfigError, match="several metrics: bleu, rouge"):
        read(file)
    with pytest.raises(DataError, match="no row has 'f1'; metrics that rows have: bleu, rouge"):
        read(file, "f1")


def test_a_file_is_compared_alone(tmp_path):
    file = write(tmp_path / "t.csv", f"{HEAD}a,0,0.5\n")
    for paths in ([file, tmp_path], [file, file]):
        with pytest.raises(ConfigError, match="a file is compared alone; write the rows of all runs into one table"):
            comparison.compare(paths)
    for paths in ([tmp_path / "no.csv"], [file, tmp_path / "no.csv"]):
        with pytest.raises(ConfigError, match=r"no.csv: RUNS: does not exist; check the path"):
            comparison.compare(paths)


def of_problems(tmp_path, seeds, without=()):
    """a and b on 200 problems; b solves those that a does not."""
    rows = [
        f"{method},{seed},p{problem},{int(problem >= (30 if method == 'a' else 1))}"
        for method in "ab"
        for seed in seeds
        for problem in range(200)
        if (method, problem) not in without
    ]
    return write(tmp_path / "p.csv", "\n".join(["method,seed,problem,accuracy", *rows]))


def test_one_run_of_each_method_is_compared_problem_by_problem(tmp_path):
    (one,) = compare(of_problems(tmp_path, [0])).facts["comparisons"]
    assert (one["test"], one["p"], one["verdict"]) == ("McNemar", 2 / 2**29, "better (McNemar)")
    assert one["difference"]["value"] == pytest.approx(0.145)
    assert "of these two models, not of the methods" in one["sentence"]


def test_runs_of_different_problems_are_refused(tmp_path):
    with pytest.raises(DataError, match=r"a seed 0 has a value for 2 problems that b seed 0 lacks, such as p3, p7; sc"):
        compare(of_problems(tmp_path, [0, 1], without=[("b", 3), ("b", 7)]))


def test_runs_without_a_common_seed_have_welchs_test_if_asked(tmp_path):
    rows = [f"a,{seed},{0.5 + seed / 100}\nb,{seed + 100},{0.6 + seed / 100}" for seed in range(4)]
    file = write(tmp_path / "t.csv", "\n".join(["method,seed,accuracy", *rows, "c,200,0.7"]))
    assert "give --unpaired" in compare(file).text
    found = compare(file, unpaired=True)
    better, single = found.facts["comparisons"]
    assert (better["test"], better["verdict"]) == ("Welch's t test", "better (Welch's t test)")
    assert "4 against 4 runs, not paired" in better["sentence"]
    assert "assumes roughly normal results in each condition" in better["sentence"]
    assert "c against a: a verdict needs 2 runs of each" in found.text
    assert single["verdict"] == "no verdict"


def test_a_dropped_seed_is_named_in_every_output(tmp_path):
    found = compare(write(tmp_path / "t.csv", csv_of([*ROWS, {"method": "dapo", "seed": 7, "accuracy": 0.6}])))
    assert "6 (without 7)" in found.text
    assert "6 (without 7)" in found.latex
    assert "6 seeds (seed 7 without a pair)" in found.page
    assert found.facts["comparisons"][0]["left_out"] == [7]


def test_the_mean_of_a_curve_can_be_the_result(tmp_path):
    rows = [row for method in RESULTS for seed in SEEDS for row in curve(method, seed, (0, 50, 99))]
    last, mean = (compare(file_of_steps(tmp_path, rows), summary=one).facts for one in ("last", "mean"))
    assert last["comparisons"][0]["difference"]["value"] == pytest.approx(0.05)
    assert mean["comparisons"][0]["difference"]["value"] == pytest.approx(0.05 * (1 + 51 + 100) / 300)


def test_a_mean_over_training_takes_the_steps_that_all_runs_have(tmp_path):
    """Over all of its steps, an equal curve that is evaluated more often was better by +0.083, p = .031."""
    rows = [
        f"{method},{seed},{step},{0.2 + step / 200 + seed / 100}"
        for method, every in (("often", 10), ("seldom", 50))
        for seed in SEEDS
        for step in range(0, 101, every)
    ]
    (one,) = compare(file_of_steps(tmp_path, rows), summary="mean").facts["comparisons"]
    assert one["difference"]["value"] == one["area"]["value"] == 0.0
    seldom = [row for row in rows if row.split(",")[0] == "often" or row.split(",")[2] == "100"]
    problem = r"needs two steps at which all runs were measured, not 1: often seed 5 at 0, 10, 20, ...; seldom seed 5"
    with pytest.raises(DataError, match=problem):
        compare(file_of_steps(tmp_path, seldom), summary="mean")


def test_the_last_attempt_of_a_log_that_goes_back_counts(tmp_path):
    rows = [row for seed in SEEDS for row in curve("grpo", seed, (0, 10, 20, 30))]
    rows += [row for seed in SEEDS for row in curve("dapo", seed, (0, 10, 20, 30))]
    rows += ["dapo,5,10,0.7", "dapo,5,20,0.8", "dapo,5,30,0.9"]
    found = read(file_of_steps(tmp_path, rows))[""]
    assert found.cells["dapo", 5].curve[1:] == ((10, 0.7), (20, 0.8), (30, 0.9))
    file = tmp_path / "t.csv"
    assert found.steps_note == (
        f"dapo seed 5 goes back from step 30 ({file}:49) to step 10 ({file}:50): "
        "3 rows of an abandoned attempt left out."
    )
    assert found.steps_note in compare(file).text
    down = [f"{method},0,{step},0.{step}" for method in ("a", "b") for step in (30, 20, 10)]
    with pytest.raises(DataError, match="the steps of every run go down from row to row; sort the rows by step"):
        read(file_of_steps(tmp_path, down))


def test_rows_of_other_metrics_between_evaluations_are_no_order(tmp_path):
    rows = [
        {"method": method, "seed": seed, "step": step, name: value}
        for method in RESULTS
        for seed in SEEDS
        for step, name, value in ((50, "loss", 1.0), (100, "accuracy", RESULTS[method][seed]))
    ]
    table = read(write(tmp_path / "t.jsonl", json_lines(rows)), "accuracy")[""]
    assert table.values("dapo") == RESULTS["dapo"]


def test_a_baseline_without_an_answer_leaves_the_others_without_a_pair(tmp_path):
    rows = [
        {"method": method, "seed": 0, "problem": str(problem), "accuracy": None if method == "a" else problem % 2}
        for method in "abc"
        for problem in range(8)
    ]
    facts = compare(write(tmp_path / "t.jsonl", json_lines(rows))).facts
    assert [one["verdict"] for one in facts["comparisons"]] == ["no pair", "no pair"]


@pytest.mark.parametrize(
    "name",
    [
        *("eval_loss", "val/perplexity", "mean_length", "policy/entropy", "wer", "time/step_s", "nll", "brier", "bpb"),
        *("brier_score", "ece", "hallucination_rate", "failures", "seconds", "rollout/truncated", "reward/failed"),
        *("steps_to_success", "val-aux/length/mean@8", "accuracy_drop", "loss_of_accuracy", "error_accuracy"),
    ],
)
def test_a_metric_whose_name_has_no_known_direction_needs_a_goal(tmp_path, name):
    rows = [f"{method},{seed},{value + seed / 100}" for method, value in (("a", 2.0), ("b", 2.5)) for seed in SEEDS]
    file = write(tmp_path / "t.csv", "\n".join([f"method,seed,{name}", *rows]))
    with pytest.raises(ConfigError, match=r"does not say whether more is better; add --goal min if less .* is better"):
        compare(file)
    (one,) = compare(file, goal="min").facts["comparisons"]
    assert one["verdict"] == "worse"
    assert "less is better" in one["sentence"]
    assert compare(file, goal="max").facts["comparisons"][0]["verdict"] == "better"


@pytest.mark.parametrize(
    "name",
    [
        *("accuracy", "eval_accuracy", "gsm8k_acc", "val-core/openai/gsm8k/acc/mean@1", "eval/gsm8k/all/avg@1"),
        *("reward/mean", "eval_reward", "rewards/accuracy_reward/mean", "score", "episode_return", "win rate"),
        *("success_rate", "pass@8", "mean@4", "f1", "exact_match", "hard/accuracy", "winRate"),
    ],
)
def test_names_with_a_known_direction(name):
    assert Outcome(metric=name).direction == "more is better"


def test_a_method_written_in_two_ways_is_one(tmp_path):
    text = 'method,seed,accuracy\ngrpo,0,0.4\ncafé,0,0.6\ncafe\u0301,1,0.7\n" café\n",2,0.7\n'
    rows = read_results_file(write(tmp_path / "t.csv", text))
    assert {(row.method, row.seed) for row in rows} == {("grpo", 0), ("café", 0), ("café", 1), ("café", 2)}
