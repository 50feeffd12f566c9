import hashlib
import itertools

import numpy as np
import pytest

from spmdlab.data.config import DataConfig
from spmdlab.data.duplicates import jaccard, shingles, signature
from spmdlab.data.ingest import Document
from spmdlab.data.lineage import Lineage
from spmdlab.data.split import SPLITS, groups, split, split_of

BEFORE = Lineage(stage="clean", version="", inputs=(), output="c", counts={})


def random_bytes(seed, length=2000):
    return np.random.default_rng(seed).integers(0, 256, length).astype(np.uint8)


def edited(content, position):
    changed = content.copy()
    changed[position] += 1
    return changed


def test_shingles_are_the_distinct_stretches_of_sixteen_tokens():
    content = np.tile(random_bytes(0, 20), 5)
    stretches = {content[i : i + 16].tobytes() for i in range(len(content) - 15)}
    assert len(shingles(content)) == len(stretches) == 20
    assert not np.array_equal(shingles(content[:15]), shingles(content[:14]))


def test_one_edit_costs_sixteen_shingles_on_each_side():
    content = random_bytes(0)
    similarity = jaccard(shingles(content), shingles(edited(content, 1000)))
    assert similarity == pytest.approx((1985 - 16) / (1985 + 16))


def test_signatures_agree_as_often_as_sets_are_similar():
    """1000 shingles in common, 1000 on each side alone: similarity a third."""
    parts = [shingles(random_bytes(seed, 1015)) for seed in range(3)]
    sets = [np.union1d(parts[0], each) for each in parts[1:]]
    agree = np.mean(signature(sets[0]) == signature(sets[1]))
    assert abs(agree - 1 / 3) < 4 * np.sqrt(1 / 3 * 2 / 3 / 128)


@pytest.mark.parametrize("threshold", [0.3, 0.8, 1.0])
def test_finds_every_cluster_that_comparing_all_would_find(threshold):
    spread = np.arange(7, 1900, 100)
    contents = [random_bytes(seed) for seed in range(1, 6)]
    contents += [edited(random_bytes(0), spread[:n]) for n in (0, 0, 1, 5, 9, 19)]
    names = groups([Document(str(i), each) for i, each in enumerate(contents)], threshold)
    root = list(range(len(contents)))
    for i, j in itertools.combinations(root[:], 2):
        if jaccard(shingles(contents[i]), shingles(contents[j])) >= threshold:
            root = [root[i] if each == root[j] else each for each in root]
    assert len(set(root)) < len(contents)
    for i, j in itertools.combinations(range(len(contents)), 2):
        assert (names[i] == names[j]) == (root[i] == root[j])


def test_near_duplicates_are_one_group_through_a_third():
    """A ~ b and b ~ c, but a and c are further apart than the threshold."""
    a = random_bytes(0)
    b = edited(a, np.arange(10, 900, 100))
    c = edited(b, np.arange(1010, 1900, 100))
    assert jaccard(shingles(a), shingles(c)) < 0.8 < jaccard(shingles(a), shingles(b))
    documents = [Document("", content) for content in (a, random_bytes(1), c, b)]
    found = groups(documents, 0.8)
    assert found[0] == found[2] == found[3] != found[1]
    assert groups(documents[::-1], 0.8) == found[::-1]


def test_no_group_is_on_two_sides_and_shares_are_as_asked():
    contents = [random_bytes(seed, 200) for seed in range(300)]
    contents += [edited(content, 0) for content in contents]
    documents = [Document(str(i), content) for i, content in enumerate(contents)]
    placed, lineage = split(documents, BEFORE, DataConfig(valid_percent=20, test_percent=30))
    sides = {name: {each.group for each in placed if each.split == name} for name in SPLITS}
    assert sum(map(len, sides.values())) == len(set.union(*sides.values())) == 300
    shares = [len(sides[name]) / 300 for name in SPLITS]
    np.testing.assert_allclose(shares, [0.5, 0.2, 0.3], atol=0.1)
    assert (lineage.counts["groups"], lineage.inputs) == (300, ("c",))


def test_a_document_does_not_move_when_others_come_and_go():
    documents = [Document(str(i), random_bytes(i, 100)) for i in range(40)]
    everywhere, _ = split(documents, BEFORE, DataConfig())
    alone, _ = split(documents[::2], BEFORE, DataConfig())
    assert [each.split for each in alone] == [each.split for each in everywhere[::2]]


def test_percentages_are_limits_on_the_hash_of_the_group():
    config = DataConfig(valid_percent=25, test_percent=25)
    for group in "abcdefghijkl":
        quarter = int(hashlib.sha256(group.encode()).hexdigest()[0], 16) // 4
        assert split_of(group, config) == ("valid", "test", "train", "train")[quarter]
