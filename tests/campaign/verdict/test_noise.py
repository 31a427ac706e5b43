import math
import re
from dataclasses import replace
from statistics import fmean, stdev

from retrain.campaign.verdict.analysis import analyze, noise_sources
from retrain.campaign.verdict.run_reader import read_campaign_tables
from retrain.campaign.verdict.sentences import text
from retrain.campaign.verdict.statistics import detectable_effect
from tests.campaign.tables import write_campaign


def test_the_spread_is_divided_into_that_of_problems_and_that_of_runs(tmp_path):
    table = read_campaign_tables(write_campaign(tmp_path, conditions=("grpo", "maxrl"), failed=(), missing=()))[0]
    grpo, maxrl = ([cell.result or 0.0 for cell in table.done(label).values()] for label in ("grpo", "maxrl"))
    spread = stdev(a - b for a, b in zip(maxrl, grpo, strict=True))
    sampled = math.sqrt(sum(fmean(rates) * (1 - fmean(rates)) for rates in (grpo, maxrl)) / 512)
    sampled = min(sampled, spread)  # less than sampling alone would give, because pairs share the problems
    fewer = math.sqrt(spread**2 - sampled**2 * 3 / 4)
    sentence = noise_sources(analyze([table]))
    found = [float(number) for number in re.findall(r"\b0\.\d{3}", sentence)]
    expected = [spread, sampled, fewer, spread * detectable_effect(14, 1), spread * detectable_effect(10, 1)]
    assert found == [round(number, 3) for number in expected]
    assert "is from 512 held-out problems" in sentence
    assert sentence in text(analyze([table]))


def test_it_is_not_divided_without_pairs_or_where_the_outcome_is_not_a_share_of_problems(tmp_path):
    one_seed = write_campaign(tmp_path / "one", conditions=("grpo", "maxrl"), seeds=[0], failed=(), missing=())
    assert noise_sources(analyze(read_campaign_tables(one_seed))) == ""
    table = read_campaign_tables(write_campaign(tmp_path / "two", conditions=("grpo", "maxrl"), seeds=range(4)))[0]
    assert noise_sources(analyze([table]))
    lengths = {key: replace(cell, problems=0) for key, cell in table.cells.items()}
    assert noise_sources(analyze([replace(table, cells=lengths)])) == ""
    equal = {key: replace(cell, curve=((200, 0.0),)) for key, cell in table.cells.items()}
    assert noise_sources(analyze([replace(table, cells=equal)])) == "", "the deviation is the resolution"
