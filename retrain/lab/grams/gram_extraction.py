"""Extraction of strategic grams from solutions: short phrases that many solutions share, clustered by meaning."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil

from retrain.algorithms.planning.embedding import EXTRA, embedder
from retrain.algorithms.planning.phrases import phrases
from retrain.errors import DataError
from retrain.system.extras import library

Runs = list[list[str]]
"""Words of one solution in runs; an n-gram lies within one run."""

_REDUNDANT = 0.9
"""A gram is dropped if this share of its solutions have a longer gram that contains it."""
_MAX_ITERATIONS = 100


@dataclass(frozen=True)
class Recipe:
    """Settings of the extraction.

    Attributes:
        n_min, n_max: smallest and largest number of words of an n-gram.
        min_df: share of the solutions that an n-gram must occur in.
        max_per_doc_rate: largest mean count of an n-gram in the solutions that contain it; more frequent phrases are
            not strategic.
        max_grams: largest number of grams; those in most solutions are kept.
        lowercase: treat "Let me check" and "let me check" as the same.
        clusters: number of clusters of k-means; fewer if there are fewer n-grams.
        top_percentile: share of the clusters that are kept.
        seed: seed of k-means.
        embedder: directory or hub name of a sentence-transformer; None is TF-IDF fitted on the n-grams.
        literal: follow the six steps of HICRA's documentation only: n-grams of words separated by white space, and no
            minimum frequency, rate, limit or pruning.
    """

    n_min: int = 3
    n_max: int = 5
    min_df: float = 0.01
    max_per_doc_rate: float = 3.0
    max_grams: int = 200
    lowercase: bool = True
    clusters: int = 100
    top_percentile: float = 0.2
    seed: int = 0
    embedder: str | None = None
    literal: bool = False


@dataclass(frozen=True)
class Cluster:
    """N-grams of similar meaning.

    Attributes:
        frequency: Cluster Document Frequency: number of solutions that contain at least one of them.
        grams: the n-grams, sorted.
        center: the gram nearest to the cluster's mean.
        selected: True if the cluster is among the most frequent.
    """

    frequency: int
    grams: tuple[str, ...]
    center: str
    selected: bool


@dataclass(frozen=True)
class Extraction:
    """Strategic grams and how they were selected.

    Attributes:
        grams: the strategic grams, sorted.
        frequencies: document frequency of every n-gram that was clustered.
        clusters: all clusters, the most frequent first.
        counts: n-grams left after each step, in order.
        solutions: number of solutions read.
    """

    grams: tuple[str, ...]
    frequencies: dict[str, int]
    clusters: tuple[Cluster, ...]
    counts: dict[str, int]
    solutions: int

    @property
    def execution(self) -> tuple[str, ...]:
        """Centers of the clusters that were not selected; the detector "semantic" uses them as execution phrases."""
        return tuple(sorted(cluster.center for cluster in self.clusters if not cluster.selected))


def extract(solutions: Sequence[str], recipe: Recipe) -> Extraction:
    """Extract strategic grams from successful solutions.

    1. Collect the n-grams of plain words: without digits and LaTeX, within one line and sentence.
    2. Keep those that occur in at least min_df of the solutions, at most max_per_doc_rate times each on average.
    3. Remove n-grams that rarely occur outside a longer one.
    4. Cluster their embeddings by k-means.
    5. Select the clusters with the highest Cluster Document Frequency, a share of top_percentile.
    6. Return the max_grams most frequent of their n-grams, without those that contain another one.

    With `literal`, all n-grams of the text are clustered, and all n-grams of the selected clusters are returned. The
    same solutions and recipe give the same grams.

    Args:
        solutions: texts of successful solutions.
        recipe: settings of the extraction.
    Raises:
        DataError: no n-gram is left after step 3.
        MissingExtraError: the extra `grams` is not installed.
    References: Wang et al., HICRA, arXiv:2509.03646. The minimum frequency, the rate and the removals are additions;
        without them two fifths of all n-grams are strategic.
    """
    documents = [_runs(solution, recipe) for solution in solutions]
    holders, candidates, counts = _candidates(documents, recipe)
    if not candidates:
        raise DataError(
            f"no n-gram of {recipe.n_min} to {recipe.n_max} words is left from {len(documents)} solutions "
            f"({', '.join(f'{name}: {count}' for name, count in counts.items())}); "
            "lower --min-df or --n-min, raise --max-per-doc-rate, or add solutions"
        )
    clusters = _clusters(candidates, holders, recipe)
    kept = [gram for cluster in clusters if cluster.selected for gram in cluster.grams]
    counts["in top clusters"] = len(kept)
    if not recipe.literal:
        shortest = _without_extensions(kept)
        kept = sorted(shortest, key=lambda gram: (-len(holders[gram]), gram))[: recipe.max_grams]
        counts |= {"not extending another": len(shortest), "kept": len(kept)}
    frequencies = {gram: len(holders[gram]) for gram in candidates}
    return Extraction(tuple(sorted(kept)), frequencies, clusters, counts, len(documents))


Holders = dict[str, frozenset[int]]
"""N-gram -> indices of the solutions that contain it."""


def _runs(solution: str, recipe: Recipe) -> Runs:
    if recipe.literal:
        return [(solution.lower() if recipe.lowercase else solution).split()]
    texts = [[(word.text, solution[word.start : word.end]) for word in run] for run in phrases(solution)]
    return [[folded if recipe.lowercase else written for folded, written in run] for run in texts]


def _candidates(documents: Sequence[Runs], recipe: Recipe) -> tuple[Holders, list[str], dict[str, int]]:
    """Select the n-grams to cluster.

    Returns:
        The solutions that contain each n-gram, the n-grams to cluster (sorted), and the counts left after every step.
    """
    # 0.07 * 100 is 7.000000000000001 in floats; the slack keeps its ceiling at 7.
    floor = 1 if recipe.literal else max(1, ceil(recipe.min_df * len(documents) - 1e-9))
    frequent = _frequent(documents, recipe.n_max, floor)
    long_enough = {gram: count for gram, count in sorted(frequent.items()) if gram.count(" ") + 1 >= recipe.n_min}
    if recipe.literal:
        holders = {gram: frozenset(where) for gram, (_, where) in long_enough.items()}
        return holders, list(holders), {"n-grams": len(holders)}
    holders = {
        gram: frozenset(where)
        for gram, (count, where) in long_enough.items()
        if count <= recipe.max_per_doc_rate * len(where)
    }
    candidates = _without_redundant(holders)
    return (
        holders,
        candidates,
        {"frequent": len(long_enough), "sparing": len(holders), "not contained": len(candidates)},
    )


def _ngrams(runs: Runs, n: int) -> Iterator[str]:
    for words in runs:
        for start in range(len(words) - n + 1):
            yield " ".join(words[start : start + n])


def _frequent(documents: Sequence[Runs], n_max: int, floor: int) -> dict[str, tuple[int, list[int]]]:
    """Return the n-grams of 1 to n_max words in at least `floor` documents: {n-gram: (count, document indices)}."""
    frequent: dict[str, tuple[int, list[int]]] = {}
    for n in range(1, n_max + 1):
        counts: dict[str, tuple[int, list[int]]] = {}
        for index, runs in enumerate(documents):
            for gram, times in Counter(_ngrams(runs, n)).items():
                # An n-gram can only be frequent if both (n-1)-grams in it are, so most need not be counted.
                if n == 1 or (gram.rpartition(" ")[0] in frequent and gram.partition(" ")[2] in frequent):
                    count, where = counts.setdefault(gram, (0, []))
                    where.append(index)
                    counts[gram] = (count + times, where)
        frequent |= {gram: count for gram, count in counts.items() if len(count[1]) >= floor}
    return frequent


def _without_extensions(grams: Collection[str]) -> list[str]:
    """Remove grams that contain another one, because the other one matches wherever they occur."""
    grams_kept = set(grams)
    lengths = range(1, max((gram.count(" ") for gram in grams), default=0) + 1)
    return [gram for gram in grams if not any(inner in grams_kept for n in lengths for inner in _inner(gram, n))]


def _inner(gram: str, n: int) -> Iterator[str]:
    """Yield the n-grams inside a longer gram."""
    words = gram.split(" ")
    return _ngrams([words], n) if n < len(words) else iter(())


def _without_redundant(holders: Holders) -> list[str]:
    """Return the grams without those that rarely occur outside a longer one."""
    redundant: set[str] = set()
    for longer, where in holders.items():
        for n in range(1, longer.count(" ") + 1):
            for inner in _inner(longer, n):
                if inner in holders and len(where & holders[inner]) >= _REDUNDANT * len(holders[inner]):
                    redundant.add(inner)
    return [gram for gram in holders if gram not in redundant]


def _clusters(grams: Sequence[str], holders: Holders, recipe: Recipe) -> tuple[Cluster, ...]:
    """Cluster the embeddings by k-means; the most frequent cluster comes first.

    One thread is used, so that sums have a fixed order and the result is reproducible.
    """
    vectors = embedder(recipe.embedder, grams)(grams)
    # n_init=1: the seed chooses the start, and further starts would cost their time again.
    means = library("sklearn.cluster", EXTRA).KMeans(
        min(recipe.clusters, len(grams)), n_init=1, max_iter=_MAX_ITERATIONS, random_state=recipe.seed
    )
    with library("threadpoolctl", EXTRA).threadpool_limits(1):
        distances = means.fit_transform(vectors)
    members: dict[int, list[int]] = {}
    for index, label in enumerate(means.labels_.tolist()):
        members.setdefault(label, []).append(index)
    built: list[Cluster] = []
    for label, rows in members.items():
        # Equal distances are ordered by text, so that the result does not depend on the order of rows.
        nearest = min(rows, key=lambda row: (float(distances[row, label]), grams[row]))
        inside = tuple(sorted(grams[row] for row in rows))
        held = frozenset[int]().union(*(holders[gram] for gram in inside))
        built.append(Cluster(len(held), inside, center=grams[nearest], selected=False))
    # Ties by text: which clusters are kept must not depend on the labels of k-means.
    built.sort(key=lambda cluster: (-cluster.frequency, cluster.grams))
    top = ceil(recipe.top_percentile * len(built) - 1e-9)
    return tuple(replace(cluster, selected=rank < top) for rank, cluster in enumerate(built))
