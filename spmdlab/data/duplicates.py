"""Which documents are the same, or nearly: MinHash and locality-sensitive hashing in NumPy.

A document is the set of its *shingles*, all stretches of 16 tokens.  The Jaccard similarity of
two documents is the share of shingles that both have among those that either has.

Source: A. Broder, On the resemblance and containment of documents, 1997; banding as in
J. Leskovec, A. Rajaraman, J. Ullman, Mining of Massive Datasets, section 3.4.
"""

import collections
import functools
import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np

SHINGLE = 16
"""Tokens in a shingle; a power of two."""

_SIGNATURE = 128
"""Points of a signature.  Rows per band times bands is at most this."""

_MISS = 1e-6
"""Probability that a pair of exactly the threshold's similarity is never compared."""


def shingles(content: np.ndarray) -> np.ndarray:
    """Returns the 64-bit hashes of the distinct shingles, sorted; a shorter document is one."""
    if len(content) < SHINGLE:
        content = np.pad(content.astype(np.int64) + 1, (0, SHINGLE - len(content)))
    hashes = _mixed(content.astype(np.uint64) + np.uint64(1))
    # A polynomial over 16 tokens in four steps: each joins two stretches of half the width.
    multiplier, width = 0x9E3779B97F4A7C15, 1
    while width < SHINGLE:
        hashes = hashes[:-width] * np.uint64(multiplier) + hashes[width:]
        multiplier, width = multiplier * multiplier % 2**64, 2 * width
    return np.unique(_mixed(hashes))


def _mixed(x: np.ndarray) -> np.ndarray:
    """Spreads 64-bit values evenly: the finaliser of SplitMix64 (G. Steele et al., 2014)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def signature(hashes: np.ndarray) -> np.ndarray:
    """Returns, from each of 128 fixed points of a circle, the first hash clockwise.

    Of the shingles of two documents together, that one is in both with a probability that is
    their Jaccard similarity; then, and only then, the signatures agree at that point.

    Args:
        hashes: What `shingles` returned.
    """
    points = np.arange(_SIGNATURE, dtype=np.uint64) * np.uint64(2**64 // _SIGNATURE)
    return hashes[np.searchsorted(hashes, points) % len(hashes)]


def jaccard(one: np.ndarray, other: np.ndarray) -> float:
    """Returns the similarity of two sets of hashes as `shingles` returns them.

    >>> jaccard(np.array([1, 2, 3]), np.array([2, 3, 4]))
    0.5
    """
    common = len(np.intersect1d(one, other, assume_unique=True))
    return common / (len(one) + len(other) - common)


def rows_per_band(threshold: float) -> int:
    """Returns how many points of a signature must agree before two documents are compared.

    The most that miss a pair at the threshold with a probability of `_MISS` at most: with ``r``
    rows in each of ``b`` bands that is ``(1 - threshold**r)**b``.
    """
    fitting = [
        rows
        for rows in range(1, _SIGNATURE + 1)
        if (1 - threshold**rows) ** (_SIGNATURE // rows) <= _MISS
    ]
    return max(fitting, default=1)


def similar_pairs(
    contents: Sequence[np.ndarray], threshold: float
) -> Iterator[tuple[int, int, float]]:
    """Yields ``(i, j, similarity)``, i < j, for pairs at least this similar.

    Candidates come from the signatures; the similarity is exact.  Pairs that are implied, because
    both are already tied to a third document, are left out: what is yielded ties every cluster
    together, and no more.  Time is linear in the tokens plus the candidates.

    Args:
        contents: Token ids [length], each at least one token long.
        threshold: Least Jaccard similarity, above 0.
    """
    signatures = [signature(shingles(content)) for content in contents]
    rows = rows_per_band(threshold)
    hashes_of = functools.lru_cache(maxsize=16)(lambda i: shingles(contents[i]))
    clusters, compared = Clusters(len(contents)), set()
    for first in range(0, _SIGNATURE - rows + 1, rows):
        buckets: dict[bytes, list[int]] = collections.defaultdict(list)
        for i, points in enumerate(signatures):
            buckets[points[first : first + rows].tobytes()].append(i)
        for bucket in buckets.values():
            for i, j in itertools.combinations(bucket, 2):
                if (i, j) in compared or clusters.find(i) == clusters.find(j):
                    continue
                compared.add((i, j))
                similarity = jaccard(hashes_of(i), hashes_of(j))
                if similarity >= threshold or math.isclose(similarity, threshold):
                    clusters.join(i, j)
                    yield i, j, similarity


class Clusters:
    """Disjoint sets of the numbers below ``n``."""

    def __init__(self, n: int) -> None:
        self._parents = list(range(n))

    def find(self, i: int) -> int:
        """Returns the smallest number in the set of ``i``."""
        while self._parents[i] != i:
            self._parents[i] = self._parents[self._parents[i]]
            i = self._parents[i]
        return i

    def join(self, i: int, j: int) -> None:
        """Makes one set of those of ``i`` and ``j``."""
        low, high = sorted((self.find(i), self.find(j)))
        self._parents[high] = low
