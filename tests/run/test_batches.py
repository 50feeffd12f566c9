import types

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

from spmdlab.run.batches import Ahead, place, rows_held
from spmdlab.run.evaluation import evaluation_batches

B, T = 8, 6


class OneProcess:
    """A sharding of which this process holds only some devices."""

    def __init__(self, sharding, devices):
        self._sharding, self._devices = sharding, devices

    def addressable_devices_indices_map(self, shape):
        indices = self._sharding.devices_indices_map(shape)
        return {device: indices[device] for device in self._devices}


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(4, 2), ("data", "tensor"))


def test_rows_are_those_of_the_devices_here_each_once(mesh):
    """Devices 2, 3 hold rows 2, 3 of a batch split over data, and 6, 7 hold rows 6, 7."""
    sharding = NamedSharding(mesh, P("data"))
    here = [jax.devices()[n] for n in (6, 7, 2, 3)]
    held = rows_held({"x": OneProcess(sharding, here)}, (B, T))
    np.testing.assert_array_equal(held, [2, 3, 6, 7])
    np.testing.assert_array_equal(rows_held({"x": sharding}, (B, T)), np.arange(B))


@pytest.mark.parametrize("spec", [P("data"), P("data", "tensor"), P(), P(("data", "tensor"))])
def test_rows_reach_their_places(mesh, spec):
    x_BT = np.arange(B * T).reshape(B, T)
    found = place({"x": x_BT}, np.arange(B), {"x": NamedSharding(mesh, spec)}, B)["x"]
    np.testing.assert_array_equal(found, x_BT)
    assert found.sharding == NamedSharding(mesh, spec)


def test_the_next_item_is_made_ahead_and_an_error_comes_in_its_turn():
    def items():
        yield 1
        yield 2
        raise ValueError("torn")

    ahead = Ahead(items())
    assert (next(ahead), next(ahead)) == (1, 2)
    with pytest.raises(ValueError, match="torn"):
        next(ahead)
    ahead.close()


def test_no_more_is_made_after_closing():
    made = []

    def items():
        while True:
            made.append(len(made))
            yield made[-1]

    ahead = Ahead(items())
    next(ahead)
    ahead.close()
    assert len(made) <= 4
    assert not ahead._thread.is_alive()


class Few:
    """Eleven examples; weights and tokens say which."""

    num_examples = 11
    lineage = (types.SimpleNamespace(output="few"),)

    def example(self, index):
        return {"tokens": np.full(T, index, np.int32), "weights": np.ones(T, np.float32)}

    def example_id(self, index):
        return str(index)


def test_an_evaluation_sees_every_example_of_a_small_split_once(mesh):
    shardings = {name: NamedSharding(mesh, P("data")) for name in ("tokens", "weights")}
    batches = evaluation_batches(
        Few(), num_batches=5, global_batch=B, seed=0, held=np.arange(B), shardings=shardings
    )
    assert len(batches) == 2
    seen = [
        int(token)
        for batch in batches
        for token, weight in zip(batch.arrays["tokens"], batch.arrays["weights"], strict=True)
        for token, weight in zip(np.asarray(token), np.asarray(weight), strict=True)
        if weight
    ]
    assert sorted(seen) == sorted([*range(11)] * T)
