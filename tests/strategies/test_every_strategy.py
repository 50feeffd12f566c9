"""What any strategy must satisfy, over products of all our parallelisms and their options."""

import pytest
from hypothesis import given, settings, strategies as st

from spmdlab.axes import LOGICAL_AXES, MESH_AXES
from spmdlab.strategies import (
    Context,
    Data,
    Expert,
    Fsdp,
    Pipeline,
    Strategy,
    Tensor,
    as_strategy,
    strategy_from_text,
)

WAYS = st.sampled_from([1, 2, 3, 4, 16, 256])
ORDERS = ["zigzag", "contiguous", None]
PARTS = {
    "data": st.builds(Data, WAYS),
    "stage": st.builds(
        lambda ways, schedule, groups, repeats: Pipeline(
            ways, schedule, groups * ways, 1 if schedule == "gpipe" else repeats
        ),
        st.integers(1, 4),
        st.sampled_from(["gpipe", "circular", "1f1b"]),
        st.integers(1, 4),
        st.integers(1, 3),
    ),
    "fsdp": st.builds(Fsdp, WAYS, zero=st.sampled_from([1, 2, 3])),
    "expert": st.builds(Expert, WAYS),
    "context": st.builds(Context, WAYS, method=st.just("ring"), order=st.sampled_from(ORDERS))
    | st.builds(Context, WAYS, method=st.just("all_to_all")),
    "tensor": st.builds(
        Tensor,
        WAYS,
        sequence=st.sampled_from(["off", "on"]),
        kv=st.sampled_from(["split", "replicate"]),
    ),
}
OPTIONS = st.dictionaries(
    st.from_regex(r"xla_[a-z0-9_]{1,12}", fullmatch=True),
    st.booleans()
    | st.integers(-(10**9), 10**9)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.from_regex(r"[A-Za-z0-9_.,:+-]{1,8}", fullmatch=True),
    max_size=3,
)


@st.composite
def any_strategy(draw):
    names = draw(st.sets(st.sampled_from(sorted(PARTS)), min_size=1))
    return Strategy(
        tuple(draw(PARTS[name]) for name in sorted(names)),
        remat=draw(st.sampled_from(["none", "full", "dots", "names"])),
        accumulate=draw(st.integers(1, 64)),
        compiler_options=tuple(draw(OPTIONS).items()),
    )


@given(any_strategy())
def test_text_round_trips(strategy):
    text = str(strategy)
    assert strategy_from_text(text) == strategy
    assert str(strategy_from_text(text)) == text


@given(any_strategy(), st.randoms())
def test_the_order_of_words_does_not_matter(strategy, random):
    words = str(strategy).split()
    random.shuffle(words)
    assert strategy_from_text(" ".join(words)) == strategy


@given(st.data(), any_strategy())
def test_the_order_of_factors_does_not_matter(data, strategy):
    """In a few of the orders: six parallelisms have 720."""
    for _ in range(3):
        parts = data.draw(st.permutations(strategy.parallelisms))
        product = as_strategy(parts[0])
        for part in parts[1:]:
            product = product * part
        product = product.with_options(
            remat=strategy.remat,
            accumulate=strategy.accumulate,
            compiler_options=strategy.compiler_options,
        )
        assert product == strategy
        assert hash(product) == hash(strategy)
        assert str(product) == str(strategy)
        assert list(product.mesh_axes) == list(strategy.mesh_axes)
        assert product.rules() == strategy.rules()


@given(any_strategy())
def test_rules_are_complete_and_name_the_mesh_in_order(strategy):
    order = list(MESH_AXES)
    for rules in (strategy.rules(), strategy.gradient_rules(), strategy.optimizer_rules()):
        assert list(rules) == list(LOGICAL_AXES)
        for mesh_axes in rules.values():
            assert set(mesh_axes) <= set(strategy.mesh_axes)
            assert list(mesh_axes) == sorted(set(mesh_axes), key=order.index)


@given(any_strategy())
@settings(max_examples=30)
def test_every_mesh_axis_is_used(strategy):
    """An axis that splits nothing would repeat the same work on all its devices."""
    used = {m for rules in strategy.rules().values() for m in rules}
    assert used == set(strategy.mesh_axes)


@pytest.mark.parametrize("part", [Data(8), Fsdp(8), Expert(8), Context(8), Tensor(8)], ids=str)
def test_a_lone_parallelism_is_a_strategy(part):
    strategy = as_strategy(part)
    assert strategy.num_devices == 8
    assert as_strategy(strategy) is strategy
    assert strategy.mesh_axes == part.axes()
