import gzip
import json
import math
from pathlib import Path

import pytest

from retrain.algorithms.graph.compose import compute_composable_advantages
from retrain.errors import ComponentError, ConfigError, DataError
from retrain.lab.credit.credit_comparison import ComparedCompletion, compare, read_completions, summarize
from retrain.lab.credit.credit_page import page

pytestmark = pytest.mark.numeric

VECTORS = json.loads((Path(__file__).parents[2] / "data" / "vectors.json").read_text())["dca"]
TOKENS = ["Let", " me", " think", ":", " 3", "+4", "=7"]
LOGPROBS = [-0.5, -0.1, -2.0, -0.3, -1.0, -0.2, -0.7]


def write(tmp_path, *rows):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def flat(case, group="a"):
    pairs = zip(case["input"]["correct"], case["input"]["lengths"], strict=True)
    return [{"group": group, "correct": bool(correct), "length": length} for correct, length in pairs]


@pytest.fixture
def group(tmp_path):
    """Two completions with log-probs and texts."""
    row = {"rewards": [1, 0], "logprobs": [LOGPROBS, LOGPROBS[:4]], "tokens": [TOKENS, TOKENS[:4]]}
    return read_completions(write(tmp_path, row))


@pytest.mark.parametrize("case", VECTORS, ids=lambda case: case["id"])
@pytest.mark.filterwarnings("ignore:.grpo_lp")
def test_the_published_advantages(tmp_path, case):
    modes = ["dca", "dca_rloo", "grpo_std", "grpo_lp"]
    found = compare(read_completions(write(tmp_path, *flat(case))), modes)
    expected = case["expected"]
    wanted = [expected["dca_grpo"], expected["dca_rloo"], expected["grpo_std"], expected["grpo_lp_gamma1e-3"]]
    for credit, values in zip(found, wanted, strict=True):
        assert credit.advantages == pytest.approx(values, abs=1e-9)


def test_parameters_come_from_their_table(tmp_path):
    completions = read_completions(write(tmp_path, *flat(VECTORS[0])))
    steep = compare(completions, ["grpo_lp"], overrides=["grpo_lp.gamma=0.002"])[0].advantages
    assert steep != pytest.approx(compare(completions, ["grpo_lp"])[0].advantages)
    none = compare(completions, ["dca"], overrides=["dca.beta=0.0"])[0].advantages
    assert none == pytest.approx(compare(completions, ["grpo_std"])[0].advantages)


def test_token_credit_is_what_training_gives(group):
    plain, chained = compare(group, ["grpo"], ["gtpo_hicra"], ["gtpo.beta=0.5", "hicra.alpha=0.3"])
    assert (plain.tokens, chained.name) == (None, "grpo + gtpo + hicra")
    assert chained.planning == [[True] * 3 + [False] * 4, [True] * 3 + [False]]
    expected = compute_composable_advantages(
        [1, 0], [LOGPROBS, LOGPROBS[:4]], chained.planning, transform_mode="gtpo_hicra", gtpo_beta=0.5, hicra_alpha=0.3
    )
    for found, wanted in zip(chained.tokens, expected.token_advs, strict=True):
        assert found == pytest.approx(wanted, abs=1e-12)
    assert chained.advantages[0] == pytest.approx(sum(chained.tokens[0]) / 7)


def test_sepa_pools_at_the_weight_asked_for(group):
    off = compare(group, ["grpo"], ["gtpo", "sepa,gtpo"], sepa_lambda=0.0)
    on = compare(group, ["grpo"], ["sepa,gtpo"], sepa_lambda=1.0)
    assert off[2].tokens == off[1].tokens
    assert on[1].tokens[0][3:] == pytest.approx([on[1].tokens[0][3]] * 4)  # execution tokens are all alike


@pytest.mark.parametrize(
    ("modes", "transforms", "overrides", "error", "text"),
    [
        (["gpro"], [], [], ComponentError, 'did you mean "grpo"'),
        (["dca"], [], ["dca.beto=1"], ConfigError, 'did you mean "beta"'),
        (["dca"], ["hicra_entropy"], [], ComponentError, "entropy"),
    ],
)
def test_names_and_parameters_that_do_not_fit(group, modes, transforms, overrides, error, text):
    with pytest.raises(error, match=text):
        compare(group, modes, transforms, overrides)


BAD = {
    '{"correct": true, "length": 3}': 'no field "group"',
    '{"group": "a", "length": 3}': 'no field "reward" or "correct"',
    '{"group": "a", "reward": 1}': 'no field "length"',
    '{"group": "a", "reward": 1, "length": 3, "logprobs": [-1, -2]}': "2 logprobs for a length of 3",
    '{"rewards": [1, 0], "lengths": [3]}': "lists of different lengths: reward 2, length 1",
    '{"group": "a", "reward": 1e400, "length": 3}': "not JSON: Out of range float values",
}


def test_all_bad_rows_are_told(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(BAD))
    with pytest.raises(DataError, match=r"rows\.jsonl:1") as caught:
        read_completions(str(path))
    lines = str(caught.value).splitlines()
    assert len(lines) == len(BAD) + 1
    for number, (line, problem) in enumerate(zip(lines, BAD.values(), strict=False), start=1):
        assert line.startswith(f"{path}:{number}")
        assert problem in line
    path.write_text('{"group": "a", "reward": 1, "logprobs": [-1, -1e400]}')
    with pytest.raises(DataError, match=r"rows\.jsonl:1: not JSON: Out of range float values"):
        read_completions(str(path))


def test_rollouts_of_a_run_are_read_as_they_are(tmp_path):
    row = {
        "group": 0,
        "reward": 0.5,
        "correct": True,
        "sampler_logprobs": [-1.0, -2.0],
        "tokens": ["a", "b"],
        "text": "ab",
    }
    (one,) = read_completions(write(tmp_path, row))
    assert (one.group, one.reward, one.correct, one.length, one.logprobs) == ("0", 0.5, True, 2, (-1.0, -2.0))


@pytest.mark.parametrize("kind", ["jsonl.gz", "parquet"])
def test_packed_rows_are_read_and_numbers_without_a_value_refused(tmp_path, kind):
    path = tmp_path / f"rows.{kind}"

    def pack(*rows):
        if kind == "parquet":
            import pyarrow as arrow
            from pyarrow import parquet

            parquet.write_table(arrow.Table.from_pylist(list(rows)), path)
        else:
            path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))
        return str(path)

    row = {"group": 1, "reward": 0.5, "logprobs": [-1.0, -2.0]}
    (one,) = read_completions(pack(row))
    assert (one.group, one.reward, one.logprobs) == ("1", 0.5, (-1.0, -2.0))
    path_of_bad = pack(row, row | {"reward": math.nan}, row | {"logprobs": [-1.0, -math.inf]})
    with pytest.raises(DataError, match=f"^{path}:2: ") as caught:
        read_completions(path_of_bad)
    nan, inf, total = str(caught.value).splitlines()
    assert "not JSON" in nan or "reward: expected a finite number" in nan
    assert inf.startswith(f"{path}:3: ")
    assert "not JSON" in inf or "logprobs[1]: expected a finite number" in inf
    assert "2 bad rows" in total
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match="cannot be read"):
        read_completions(str(path))


def test_logprobs_in_some_rows_only_are_refused(tmp_path):
    path = write(tmp_path, {"group": 1, "reward": 1, "logprobs": [-1.0]}, {"group": 1, "reward": 1, "length": 1})
    with pytest.raises(DataError, match=r"rows\.jsonl:2: no logprobs"):
        read_completions(path)


def made(*facts):
    return [ComparedCompletion("", group, float(right), right, length) for group, right, length in facts]


def test_the_summary_by_hand():
    completions = made(("a", True, 10), ("a", True, 30), ("a", False, 20), ("b", True, 5), ("b", True, 6))
    found = summarize([1.0, -2.0, -1.0, 0.0, 0.0], completions)
    assert found["correct_above_0"] == 0.5  # of the two in the mixed group
    assert found["below_wrong"] == 0.5
    assert found["zero"] == 0.4
    assert (found["least"], found["greatest"]) == (-2.0, 1.0)
    # less its group's mean an advantage is 1.5, -1.5, 0, 0 and a length -10, 10, -.5, .5
    assert found["length_correlation"] == pytest.approx(-30 / (4.5 * 200.5) ** 0.5)


def test_the_page_escapes_what_the_file_says_and_holds_no_script(tmp_path):
    row = {"group": "<script>", "rewards": [1, 0], "logprobs": [[-1.0], [-2.0]], "tokens": [["<b>"], ["\n"]]}
    completions = read_completions(write(tmp_path, row))
    text = page("<x>", completions, compare(completions, ["grpo"], ["gtpo"]))
    assert "<script" not in text
    assert "<b></span>" not in text
    assert "&lt;b&gt;</span>" in text
    assert "<h1>&lt;x&gt;</h1>" in text
    assert "default-src 'none'" in text


def test_the_page_draws_a_mark_for_each_completion_and_a_cell_for_each_token(group):
    text = page("x", group, compare(group, ["grpo", "dca"], ["gtpo"]))
    assert text.count('<circle class="right-dot" cx="6"') == 1  # in the key
    assert text.count('class="right-dot"') - 1 == 2
    assert text.count('class="wrong-dot"') - 1 == 2
    assert text.count('title="') == 2 * len(TOKENS + TOKENS[:4])
    assert "planning" in text
