"""The exact claims, and the tables of benchmarks/RESULTS.md that show them."""

import pytest

from benchmarks.evidence.exact_claims import BETAS, GAMMAS, IMAGES, decoupled, figures, penalised, tables, weight
from benchmarks.results import read


def test_the_normalisation_absorbs_the_coefficient_of_a_length_penalty():
    first = penalised(GAMMAS[1])
    assert first == pytest.approx([1.342, 0.447, -0.447, -1.342], abs=1e-3)
    for gamma in GAMMAS[2:]:
        assert penalised(gamma) == pytest.approx(first, rel=1e-3)


def test_dca_scales_with_beta_and_its_length_term_is_bounded():
    whole = decoupled(1.0)
    for beta in BETAS:
        assert decoupled(beta) == pytest.approx([beta * value for value in whole])
    assert max(map(abs, whole)) < 1


def test_the_standard_deviation_weighs_very_easy_and_very_hard_questions_up():
    """E|A| without division is G * 2 p (1 - p) * (G - 1) / G: the pairs of which one is right."""
    assert weight("grpo", 0.25) == pytest.approx(8 * 2 * 0.25 * 0.75 * 7 / 8)
    for rate in (0.02, 0.1, 0.9, 0.98):
        assert weight("grpo_std", rate) / weight("grpo", rate) > weight("grpo_std", 0.5) / weight("grpo", 0.5)


def test_the_results_show_the_tables():
    assert read("exact-claims") == tables()


@pytest.mark.slow
def test_the_figures_are_those_of_the_formulas():
    drawn = figures()
    assert {name: (IMAGES / name).read_text() for name in drawn} == drawn
