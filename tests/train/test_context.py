"""One step with sequences split over devices, against one device: loss and every gradient."""

import jax
import numpy as np
import pytest

from spmdlab.compile import lay_out
from spmdlab.errors import ShardingError
from spmdlab.mesh import MeshShards, constrainer
from spmdlab.models.params import apply
from spmdlab.strategies import Context, Data, Fsdp, Tensor, as_strategy
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_batch, abstract_state
from spmdlab.train.step import make_step
from spmdlab.workload import BatchConfig, Workload
from tests.train.test_step import (
    TOLERANCE,
    T,
    alone,
    check_same,
    fresh,
    on_the_mesh,
    random_batch,
    workload,
)

# Two key and value heads for eight query heads: fewer than most of the ways here.
GROUPED = {"num_kv_heads": 2}

CASES = {
    "ring_data": (Context(4) * Data(2), GROUPED),
    "ring_fsdp": (Context(2) * Fsdp(4), GROUPED),
    "ring_tensor": (Context(4) * Tensor(2), GROUPED),
    "ring_alone": (Context(8), {}),
    "ring_contiguous": (Context(4, order="contiguous") * Fsdp(2), GROUPED),
    "ring_fsdp_tensor_sequence": (
        (Context(2) * Fsdp(2) * Tensor(2, sequence="on")).with_options(accumulate=2, remat="names"),
        GROUPED,
    ),
    "ring_zero1_unrolled_dropout": (
        (Context(2) * Fsdp(2, zero=1) * Tensor(2, kv="replicate")).with_options(remat="full"),
        {"num_kv_heads": 1, "layers": "unrolled", "dropout": 0.5},
    ),
    "exchange_data": (Context(4, method="all_to_all") * Data(2), GROUPED),
    "exchange_tensor_sequence": (
        Context(2, method="all_to_all") * Tensor(4, sequence="on", kv="replicate"),
        {**GROUPED, "dropout": 0.5, "embeddings": "tied"},
    ),
    "exchange_fsdp_tensor": (
        (Context(2, method="all_to_all") * Fsdp(2) * Tensor(2)).with_options(
            accumulate=2, remat="full"
        ),
        GROUPED,
    ),
}


@pytest.mark.parametrize(("strategy", "changes"), CASES.values(), ids=CASES)
def test_a_split_sequence_gives_what_one_device_does(strategy, changes):
    """The tolerance is that of `test_step`: the same float32 terms in another order.

    A device that took its keys for another's, or local indices for positions, is off by the
    size of the gradient itself, as is a ring that drops or repeats a block.
    """
    check_same(on_the_mesh(strategy, **changes), alone(**changes))


def test_logits_come_back_in_reading_order():
    """Tokens go in and logits come out as people write them, whatever stands where within."""
    strategy, load = Context(4) * Data(2), workload()
    layout = lay_out(load, strategy, parse_target("cpu:8"))
    shards = MeshShards(layout.mesh, strategy.rules(), strategy.sequence_split)
    params, tokens = fresh()["params"], random_batch()["tokens"]

    @jax.jit
    def split(params, tokens):
        constrain = constrainer(layout.mesh, strategy.rules())
        return apply(load.model, params, tokens, constrain=constrain, shards=shards)

    found = split(params, tokens)
    expected = jax.jit(lambda *args: apply(load.model, *args))(params, tokens)
    atol = TOLERANCE * float(np.abs(expected).max())
    np.testing.assert_allclose(found, expected, atol=atol)
    wrong = np.roll(expected, T // 8, axis=1)  # what a chunk out of place would look like
    assert np.abs(wrong - expected).max() > 100 * atol


@pytest.mark.parametrize(
    ("strategy", "seq_len", "changes", "message"),
    [
        (Context(4), 18, {}, r"dim 1 'act_len' of size 18 does not divide 4 ways over context=4"),
        (
            Context(4),
            20,
            {},
            r"'act_len' of size 20 does not divide into 2 x 4 chunks over context=4, which "
            r"order=zigzag needs.  Nearest sizes that do: 16 and 24",
        ),
        (
            Context(2, method="all_to_all") * Tensor(2),
            16,
            {"num_heads": 6, "num_kv_heads": 2},
            r"'act_heads' of size 6 does not divide 4 ways over context=2 and the 2 ways heads "
            r"are split already, which method=all_to_all needs.  Most ways of context that do: 3",
        ),
    ],
    ids=["length", "chunks", "heads"],
)
def test_refuses_what_does_not_divide(strategy, seq_len, changes, message):
    strategy = as_strategy(strategy)
    batch = BatchConfig(global_batch=4, seq_len=seq_len)
    load = Workload(model=workload(**changes).model, batch=batch)
    with pytest.raises(ShardingError, match=message):
        traced(load, strategy)


def traced(load, strategy):
    layout = lay_out(load, strategy, parse_target(f"cpu:{strategy.num_devices}"))
    step = make_step(
        load,
        strategy,
        constrainer(layout.mesh, strategy.rules()),
        shards=MeshShards(layout.mesh, strategy.rules(), strategy.sequence_split),
    )
    jax.eval_shape(step, abstract_state(load), abstract_batch(load, strategy.num_devices))
