import dataclasses
import itertools

import numpy as np
import pytest

from spmdlab.data.lineage import Lineage
from spmdlab.data.loader import example_order, loader


@dataclasses.dataclass(frozen=True)
class Numbers:
    """Example i is the number i and its square: no text."""

    num_examples: int
    name: str = "numbers"

    @property
    def lineage(self):
        return (Lineage(stage="x", version="", inputs=(), output=self.name, counts={}),)

    def example(self, index):
        return {"x": np.array([index]), "y": np.array(index**2)}

    def example_id(self, index):
        return str(index)

    def group(self, index):
        return "all"


def batches(num_steps, dataset=None, **options):
    options = {"seed": 0, **options}
    return list(itertools.islice(loader(dataset or Numbers(9), **options), num_steps))


def ids(found):
    return [each for batch in found for each in batch.ids]


def test_an_epoch_has_every_example_once_and_the_next_another_order():
    found = ids(batches(6, global_batch=3))
    first, second = found[:9], found[9:]
    assert sorted(first) == sorted(second) == [str(i) for i in range(9)]
    assert first != second


def test_the_order_does_not_depend_on_the_batch_size_or_where_a_run_resumes():
    expected = ids(batches(12, global_batch=2))
    assert ids(batches(3, global_batch=8)) == expected
    (resumed,) = batches(1, global_batch=8, first_step=2)
    assert (resumed.step, resumed.ids) == (2, expected[16:])


def test_the_order_depends_on_the_data_and_the_seed():
    orders = {
        tuple(ids(batches(1, Numbers(100, name), global_batch=100, seed=seed)))
        for name in ("one", "other")
        for seed in (0, 1)
    }
    assert len(orders) == 4


@pytest.mark.parametrize("rows", [np.array([3, 0]), [slice(3, 4), slice(0, 1)]])
def test_a_process_gets_its_rows_and_the_ids_of_all(rows):
    whole = batches(3, global_batch=4)
    for part, all_rows in zip(batches(3, global_batch=4, rows=rows), whole, strict=True):
        assert part.ids == all_rows.ids
        for name in ("x", "y"):
            np.testing.assert_array_equal(part.rows[name], all_rows.rows[name][[3, 0]])
        np.testing.assert_array_equal(all_rows.rows["x"][:, 0], np.array(all_rows.ids, int))


def test_refuses_a_row_beyond_the_batch():
    with pytest.raises(IndexError):
        loader(Numbers(9), global_batch=4, seed=0, rows=np.array([4]))


def test_any_position_can_be_asked_for_at_once():
    order = example_order(Numbers(9), seed=0)
    assert sorted(order[9 * 10**9 + i] for i in range(9)) == list(range(9))
