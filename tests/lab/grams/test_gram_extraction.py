import random

import pytest

from retrain.errors import DataError
from retrain.lab.grams.gram_extraction import Recipe, extract

PLANS = ["let me check this again", "another way to see it", "the key idea here is symmetry"]
STEPS = ["{} plus {} is equal to {}", "we divide {} by {} and get {}", "the length of side {} is {}, not {}"]


def corpus(count=120):
    """Each solution: a plan that many share, steps of common words, and some words of its own."""
    rng = random.Random(0)
    letters = "bcdfghklmnprstvw"
    texts = []
    for _ in range(count):
        own = ["".join(rng.choices(letters, k=6)) for _ in range(12)]
        lines = [rng.choice(STEPS).format(*rng.sample(range(10, 99), 3)) for _ in range(4)]
        texts.append("\n".join([rng.choice(PLANS).capitalize() + ".", " ".join(own), *lines, rng.choice(PLANS)]))
    return texts


def test_phrases_that_many_solutions_share_come_out_whole():
    found = extract(corpus(), Recipe(clusters=6, top_percentile=1.0))
    assert {"let me check this again", "another way to see it"} <= set(found.grams)
    assert "is equal to" in found.grams
    assert list(found.grams) == sorted(found.grams)
    assert found.solutions == 120
    words = " ".join(found.grams)
    assert not any(character.isdigit() for character in words)
    # inside a longer phrase, and never without it
    assert "let me check" not in found.grams
    assert found.frequencies["is equal to"] == sum("is equal to" in text for text in corpus())


def test_cluster_document_frequency_counts_solutions_once():
    texts = corpus()
    found = extract(texts, Recipe(clusters=4, top_percentile=0.5))
    assert [cluster.selected for cluster in found.clusters] == [True, True, False, False]
    for cluster in found.clusters:
        lowered = [text.lower() for text in texts]
        assert cluster.frequency == sum(any(gram in text for gram in cluster.grams) for text in lowered)
        assert cluster.center in cluster.grams
    assert [cluster.frequency for cluster in found.clusters] == sorted(
        (cluster.frequency for cluster in found.clusters), reverse=True
    )
    inside = {gram for cluster in found.clusters[:2] for gram in cluster.grams}
    assert set(found.grams) <= inside
    assert found.execution == tuple(sorted(cluster.center for cluster in found.clusters[2:]))
    assert list(found.counts.values()) == sorted(found.counts.values(), reverse=True)


def test_the_literal_steps_keep_every_n_gram_of_the_selected_clusters():
    texts = ["Let me check. x = 12", "Let me check. y = 7", "then 2 + 2 = 4 holds"]
    found = extract(texts, Recipe(n_min=3, n_max=4, clusters=3, top_percentile=1.0, literal=True))
    every = {" ".join(words[i : i + n]) for text in texts for words in [text.lower().split()]
             for n in (3, 4) for i in range(len(words) - n + 1)}  # fmt: skip
    assert set(found.grams) == every
    assert {"let me check.", "2 + 2", "check. x = 12"} <= every
    top = extract(texts, Recipe(n_min=3, n_max=4, clusters=3, top_percentile=0.3, literal=True))
    assert set(top.grams) == set(top.clusters[0].grams)
    assert top.clusters[0].frequency == max(cluster.frequency for cluster in top.clusters)
    assert top.counts == {"n-grams": len(every), "in top clusters": len(top.grams)}


def test_the_frequency_floor_and_the_rate():
    texts = ["we go on and on"] * 5 + ["rare words appear here once"] + [""] * 94
    assert "rare words appear here once" in extract(texts, Recipe(top_percentile=1.0)).grams
    assert extract(texts, Recipe(min_df=0.02, top_percentile=1.0)).grams == ("we go on and on",)
    chant = ["say it now. " * 4 + "then we stop here"] * 3
    assert extract(chant, Recipe(top_percentile=1.0)).grams == ("then we stop here",)
    assert "say it now" in extract(chant, Recipe(max_per_doc_rate=4, top_percentile=1.0)).grams


def test_a_gram_that_extends_another_is_left_out():
    texts = ["let me think about it"] * 5 + ["let me think"] * 20 + ["12"] * 10
    assert extract(texts, Recipe(top_percentile=1.0)).grams == ("let me think",)


def test_nothing_left_says_what_to_change():
    with pytest.raises(DataError, match=r"frequent: 0.*lower --min-df"):
        extract(["1 + 1 = 2", "so $x$"], Recipe())
