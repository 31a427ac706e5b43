"""What the scripts and plug-ins beside the campaigns of the evidence compute."""

import json
import math
import random
from pathlib import Path

import pytest
import torch

from benchmarks.evidence import audit_and_training as audits
from benchmarks.evidence import noise_of_credit
from benchmarks.evidence.first_mistake import Steps, auc, figures, steps
from retrain.lab.tasks.noisy import flipped
from retrain.registry import find
from retrain.tools.prm_scores import ScoredRow
from tests.campaign.tables import write_cell

PLUGINS = [Path(audits.__file__).with_name("plugins")]


def scored(*rewards):
    return ScoredRow(1, 0.0, 0.0, len(rewards), False, "", rewards)


def test_a_step_scores_the_sum_of_its_tokens_up_to_the_first_wrong_one():
    text = "+1=3\n+4=8\n+2=0\nso 0"
    row = scored(("+1", 0.5), ("=3\n", 0.25), ("+4=", -1.0), ("8\n", -2.0), ("+2=0\n", 4.0), ("so 0", 8.0), ("", 16.0))
    assert steps(text, [(5, 10)], row) == Steps([0.75], -3.0)
    assert steps(text, [], row) == Steps([0.75, -3.0, 4.0], None)


def test_auc_counts_pairs_and_half_of_ties():
    assert auc([0.0], [1.0, 2.0, 0.0, -1.0]) == pytest.approx(2.5 / 4)
    assert auc([-3.0, -2.0], [0.0, 1.0]) == 1.0


def test_mistakes_are_compared_over_all_answers_and_within_each():
    found = figures([Steps([1.0, 2.0], 0.0), Steps([-1.0], 0.5), Steps([], 0.0), Steps([3.0], None)])
    assert found["auc"] == pytest.approx((3 + 3 + 3) / 12)  # of the right 1, 2, -1 and 3, all but -1 are higher
    assert found["within"] == 0.5
    assert found["lowest"] == 0.5
    assert found["chance"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["mistakes"] == 3


def test_audits_are_ranked_against_what_training_gave(tmp_path):
    areas = {"grpo": 0.5, "good": 0.6, "same": 0.5, "bad": 0.3}
    cells = []
    for seed in range(3):
        for method, final in areas.items():
            path = f"cells/rare-{method}/s{seed}"
            cells.append({"id": path, "condition": f"rare: {method}", "seed": seed, "path": path, "max_steps": 40})
            cells[-1] |= {"task": "rare"}
            write_cell(tmp_path / path, "grpo", seed, final, random.Random(seed), range(0, 41, 20), 40)
            (tmp_path / path / "outcome.json").write_text(json.dumps({"status": "done", "exit_code": 0}))
    plan = {"tasks": ["rare"], "baseline": "grpo", "ladder": [], "premises": {}, "threshold": None, "alpha": 0.05}
    (tmp_path / "plan.json").write_text(json.dumps(plan | {"cells": cells}))

    def audited(**values):
        methods = {name: {"effective_batch": {"value": value}} for name, value in values.items()}
        return {"task": "rare", "methods": methods}

    rows = [audited(good=1.5, same=1.0, bad=0.5, oracle=2.0), audited(good=1.5, same=1.0, bad=None)]
    points = audits.paired(tmp_path, rows)
    assert points["rare"]["good"][0] == pytest.approx(math.log(1.5))
    assert points["rare"]["bad"][0] == pytest.approx(math.log(0.5))
    assert set(points["rare"]) == {"good", "same", "bad"}
    assert audits.correlation(points) == pytest.approx(1.0)
    low, high = audits.interval(points, draws=50)
    assert -1 <= low <= high <= 1
    drawn = audits.scatter(points)
    assert [drawn.count(f"<title>{name}</title>") for name in points["rare"]] == [1, 1, 1]
    assert drawn.count(">rare</text>") == 1
    turned = audits.paired(tmp_path, [audited(good=0.5, same=1.0, bad=1.5)])
    assert audits.correlation(turned) == pytest.approx(-1.0)


@pytest.mark.slow
def test_parts_of_the_tokens_have_shares_of_signal_and_variance(train, capsys):
    run = train("training.max_steps=1")
    capsys.readouterr()
    noise_of_credit.main(str(run), batches=5, continuations=2)
    head, *lines = capsys.readouterr().out.splitlines()
    assert head.split() == ["credit", "kept", "tokens", "signal", "variance", "bias", "of", "the", "oracle's"]
    assert [line[:8].strip() for line in lines] == [name for name in ("oracle", "grpo", "gtpo") for _ in range(5)]
    table = [line[50:].replace("%", "").split()[:3] for line in lines]
    for first in range(0, 15, 5):
        whole, rare, likely, sharp, open_ = ([float(number) for number in row] for row in table[first : first + 5])
        assert whole == [100.0, 1.0, 1.0]
        for one, other in ((rare, likely), (sharp, open_)):
            assert one[0] + other[0] == pytest.approx(100, abs=0.11)
            assert one[1] + other[1] == pytest.approx(1, abs=0.011), "gradients add up"
        assert sharp[0] == pytest.approx(90, abs=1)
    assert lines[0].endswith(" 0.000  1.00 [1.00, 1.00]")


def test_credit_is_weighed_by_its_sign_and_entropy_is_that_of_every_row():
    signs = find("transform", "signs.signs", PLUGINS).target
    credit = torch.tensor([[2.0, -3.0], [0.0, 4.0]])
    columns = torch.tensor([[0.5, 0.25], [0.75, 8.0]]), torch.tensor([[True, True], [True, False]])
    weighed, metrics = signs(credit, *columns, above=0.1)
    assert weighed.tolist() == [[pytest.approx(0.2), -3.0], [0.0, pytest.approx(0.4)]]
    weighed, same = signs(credit, *columns, below=0.0)
    assert weighed.tolist() == [[2.0, 0.0], [0.0, 4.0]]
    assert metrics == same == {"signs/entropy": 0.5}, "rows without credit count"


@pytest.mark.parametrize(("name", "right", "wrong"), [("false_positives", 0.0, 0.3), ("false_negatives", 0.3, 0.0)])
def test_verdicts_are_wrong_in_one_direction_only(name, right, wrong):
    verdict = find("reward", f"one_sided.{name}", PLUGINS).target
    drawn = [{"id": f"{index}", "extra": {"flips": 0.3}} for index in range(2000)]
    assert sum(verdict("so 5", "5", problem) == 0 for problem in drawn) / 2000 == pytest.approx(right, abs=0.04)
    assert sum(verdict("so 6", "5", problem) == 1 for problem in drawn) / 2000 == pytest.approx(wrong, abs=0.04)
    mistaken = [flipped("so 6", "5", problem) for problem in drawn]
    assert wrong == 0.0 or [verdict("so 6", "5", problem) for problem in drawn] == mistaken, "the same as in both"
    assert verdict("so 5", "5", {"id": "0", "extra": {}}) == 1.0, "held-out answers are judged rightly"
