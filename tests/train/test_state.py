import jax
import numpy as np
import pytest

from spmdlab.compile import lay_out
from spmdlab.models.config import DecoderConfig
from spmdlab.strategies.fsdp import Fsdp
from spmdlab.strategies.product import as_strategy
from spmdlab.strategies.tensor import Tensor
from spmdlab.targets import parse_target
from spmdlab.train.state import (
    abstract_batch,
    abstract_state,
    batch_arrays,
    by_path,
    init_state,
    paths,
    state_arrays,
)
from spmdlab.workload import BatchConfig, Workload


def workload(**changes) -> Workload:
    sizes = {
        "vocab_size": 64,
        "num_layers": 2,
        "embed_dim": 16,
        "num_heads": 2,
        "num_kv_heads": 2,
        "head_dim": 8,
        "mlp_dim": 32,
    }
    model = DecoderConfig(**{**sizes, **changes})
    return Workload(model=model, batch=BatchConfig(per_device_batch=2, seq_len=8))


def test_abstract_state_is_the_shape_of_the_real_one():
    real = jax.tree.map(lambda x: (x.shape, x.dtype), init_state(workload(), jax.random.key(0)))
    assert jax.tree.map(lambda x: (x.shape, x.dtype), abstract_state(workload())) == real


def test_optimizer_state_has_its_parameters_axes():
    arrays = {array.path: array for array in state_arrays(workload())}
    gate = arrays["params.layers.mlp.gate"]
    assert (gate.logical_axes, gate.role) == (("layers", "embed", "mlp"), "param")
    moments = [a for path, a in arrays.items() if path.endswith("nu.layers.mlp.gate")]
    assert [(m.path, m.shape, m.logical_axes, m.role) for m in moments] == [
        ("optimizer.adam.nu.layers.mlp.gate", gate.shape, gate.logical_axes, "optimizer")
    ]
    assert arrays["optimizer.adam.count"].logical_axes == ()
    assert arrays["step"].role == "step"


@pytest.mark.parametrize("layers", ["scanned", "unrolled"])
def test_lists_every_array_of_the_state_once(layers):
    load = workload(layers=layers)
    state = abstract_state(load)
    found = {array.path: array.shape for array in state_arrays(load)}
    assert by_path(state, found) == jax.tree.map(lambda leaf: leaf.shape, state)
    assert len(found) == len(jax.tree.leaves(state))


def test_paths_begin_with_the_prefix():
    batch = abstract_batch(workload(), 8)
    assert paths(batch, "batch") == {name: f"batch.{name}" for name in batch}
    assert {array.path: array.shape for array in batch_arrays(workload(), 8)} == {
        f"batch.{name}": (16, 8) for name in ("tokens", "targets", "weights")
    }


@pytest.mark.parametrize("strategy", [Fsdp(8), Fsdp(4) * Tensor(2)], ids=str)
def test_initial_values_do_not_depend_on_the_mesh(strategy):
    """Equal to the bit; and no device ever holds a whole matrix."""
    layout = lay_out(workload(), as_strategy(strategy), parse_target("cpu:8"))
    shardings = layout.shardings(abstract_state(workload()))
    state = init_state(workload(), jax.random.key(0), shardings)
    alone = init_state(workload(), jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, state, alone)
    for kind in (state["params"], state["optimizer"]["adam"].mu):
        gate = kind["layers"]["mlp"]["gate"]
        assert gate.addressable_shards[0].data.size * 8 == gate.size
