"""Partition specs: what is laid out, and everything that is refused."""

import numpy as np
import pytest
from hypothesis import given, strategies as st
from jax.sharding import PartitionSpec as P

from spmdlab.errors import ShardingError
from spmdlab.strategies import Data, Fsdp, Tensor
from spmdlab.strategies.resolve import partition_spec

MESH = {"data": 2, "fsdp": 4, "tensor": 2}
RULES = (Data(2) * Fsdp(4) * Tensor(2)).rules()


@pytest.mark.parametrize(
    ("shape", "axes", "spec"),
    [
        ((), (), P()),
        ((8, 6), ("embed", "mlp"), P("fsdp", "tensor")),
        ((3, 8, 6, 5), ("layers", "embed", "heads", "head_dim"), P(None, "fsdp", "tensor", None)),
        ((16, 5), ("act_batch", "act_len"), P(("data", "fsdp"), None)),
        ((7,), ("norm",), P(None)),
        ((7, 4), (None, "embed"), P(None, "fsdp")),
    ],
)
def test_lays_out(shape, axes, spec):
    assert partition_spec("w", shape, axes, RULES, MESH) == spec


@pytest.mark.parametrize(
    ("shape", "axes", "message"),
    [
        pytest.param((8,), ("embde",), "dim 0 'embde' has no rule.*Axes with a rule", id="no-rule"),
        pytest.param((8, 8), ("embed",), r"1 logical axes \(embed\) for 2 dims", id="too-few"),
        pytest.param((), ("embed",), "1 logical axes .* for 0 dims", id="scalar"),
        pytest.param(
            (8, 8), ("embed", "embed"), "dim 1 'embed' and dim 0 'embed'.*'fsdp'", id="axis-twice"
        ),
        pytest.param(
            (14330, 3),
            ("embed", "mlp"),
            "a.w: dim 0 'embed' of size 14330 does not divide 4 ways over fsdp=4.*14328 and 14332"
            ".*Most ways that divide 14330: 2.*dim 1 'mlp' of size 3 .*2 and 4",
            id="uneven-twice",
        ),
        pytest.param(
            (12,), ("act_batch",), "8 ways over data=2 x fsdp=4.*8 and 16.*: 6", id="product"
        ),
        pytest.param(
            (3,), ("embed",), "Nearest sizes that do: 4.  Most ways .*: 3", id="too-small"
        ),
    ],
)
def test_refuses(shape, axes, message):
    with pytest.raises(ShardingError, match=message) as caught:
        partition_spec("a.w", shape, axes, RULES, MESH)
    assert "a.w" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_fewer_kv_heads_than_ways_is_refused_with_the_way_out():
    split, copied = Tensor(4), Tensor(4, kv="replicate")
    shape, axes = (16, 2, 8), ("embed", "kv_heads", "head_dim")
    with pytest.raises(ShardingError, match=r"'kv_heads' of size 2 .* 4 ways.*kv=\"replicate\""):
        partition_spec("k", shape, axes, (Data(1) * split).rules(), {"data": 1, "tensor": 4})
    rules = (Data(1) * copied).rules()
    assert partition_spec("k", shape, axes, rules, {"data": 1, "tensor": 4}) == P(None, None, None)


def test_a_mesh_without_the_axis_is_refused():
    with pytest.raises(
        ShardingError, match=r"mesh axis 'tensor', which the mesh does not have.*data"
    ):
        partition_spec("w", (4,), ("mlp",), RULES, {"data": 2})


@given(st.integers(1, 300), st.integers(1, 64))
def test_the_sizes_and_ways_it_advises_work(size, ways):
    rules = {"embed": ("fsdp",)}

    def lay_out(size, ways):
        return partition_spec("w", (size,), ("embed",), rules, {"fsdp": ways})

    if size % ways == 0:
        assert lay_out(size, ways) == P("fsdp")
        return
    with pytest.raises(ShardingError) as caught:
        lay_out(size, ways)
    sizes, fewer = str(caught.value).split("Nearest sizes that do: ")[1].split(".  ")
    for near in map(int, sizes.split(" and ")):
        lay_out(near, ways)
        assert 0 < abs(near - size) < ways
    fewer = int(fewer.rstrip(".").rsplit(" ", 1)[1])
    lay_out(size, fewer)
    assert fewer == max(n for n in np.arange(1, ways) if size % n == 0)
