"""Divides documents into train, valid and test, by group and never by row."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Literal

from spmdlab.data.config import DataConfig
from spmdlab.data.duplicates import Clusters, similar_pairs
from spmdlab.data.ingest import Document
from spmdlab.data.lineage import Lineage, json_hash

Split = Literal["train", "valid", "test"]
SPLITS: tuple[Split, ...] = ("train", "valid", "test")


@dataclasses.dataclass(frozen=True, eq=False)
class Placed:
    """A document with its place."""

    document: Document
    group: str
    """The smallest digest among the documents of its group."""

    split: Split


def groups(documents: Sequence[Document], near_duplicate: float) -> list[str]:
    """Returns each document's group: documents tied by near duplicates share one.

    The name of a group is the smallest digest in it, so it does not depend on the order.
    """
    clusters = Clusters(len(documents))
    for i, j, _ in similar_pairs([each.content for each in documents], near_duplicate):
        clusters.join(i, j)
    smallest: dict[int, str] = {}
    for i, document in enumerate(documents):
        root = clusters.find(i)
        smallest[root] = min(smallest.get(root, document.digest), document.digest)
    return [smallest[clusters.find(i)] for i in range(len(documents))]


def split_of(group: str, config: DataConfig) -> Split:
    """Returns where a group belongs.

    It follows from the group's content alone, so that a group does not move when others come
    and go, nor with the seed.  The percentages hold on average over groups.
    """
    # Hashed once more: the smallest of several digests is no fair draw, it is low.
    drawn = hashlib.sha256(group.encode()).hexdigest()[:12]
    percent = int(drawn, 16) / 16**12 * 100
    if percent < config.valid_percent:
        return "valid"
    return "test" if percent < config.valid_percent + config.test_percent else "train"


def split(
    documents: Sequence[Document], before: Lineage, config: DataConfig
) -> tuple[list[Placed], Lineage]:
    """Returns every document with its group and split, in the order given.

    Args:
        documents: What `spmdlab.data.ingest.clean` returned.
        before: Their lineage.
        config: The percentages and the threshold.
    """
    placed = [
        Placed(document, group, split_of(group, config))
        for document, group in zip(documents, groups(documents, config.near_duplicate), strict=True)
    ]
    lineage = Lineage(
        stage="split",
        version=(
            f"by group 1, jaccard >= {config.near_duplicate:g}, "
            f"valid {config.valid_percent:g}%, test {config.test_percent:g}%"
        ),
        inputs=(before.output,),
        output=json_hash([(each.document.digest, each.group, each.split) for each in placed]),
        counts={
            "groups": len({each.group for each in placed}),
            **{name: sum(each.split == name for each in placed) for name in SPLITS},
        },
    )
    return placed, lineage
