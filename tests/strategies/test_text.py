"""Strategies as text: the forms and the mistakes."""

import pytest

from spmdlab.errors import ConfigError
from spmdlab.strategies import (
    PARALLELISMS,
    Context,
    Data,
    Fsdp,
    Tensor,
    Words,
    as_strategy,
    strategy_from_text,
)


def test_reads_all_that_a_strategy_holds():
    expected = (Data(2) * Fsdp(4, zero=1) * Tensor(2, sequence="on", kv="replicate")).with_options(
        remat="full", accumulate=4, compiler_options={"xla_a": True, "xla_b": 3, "xla_c": "auto"}
    )
    assert expected == strategy_from_text(
        "tensor=2 kv=replicate sequence=on accumulate=4 xla_c=auto fsdp=4 zero=1 remat=full "
        "xla_b=3 data=2 xla_a=true"
    )


def test_a_default_is_not_written():
    assert str(Fsdp(4, zero=3) * Tensor(2, kv="split")) == "fsdp=4 tensor=2"


@pytest.mark.parametrize(
    ("text", "strategy"),
    [
        ("context=4", Context(4, method="ring", order="zigzag")),
        ("context=4 order=contiguous", Context(4, order="contiguous")),
        ("context=4 method=all_to_all", Context(4, method="all_to_all", order="contiguous")),
    ],
)
def test_context_has_an_order_of_its_own_for_each_method(text, strategy):
    assert strategy_from_text(text) == as_strategy(strategy)
    assert str(strategy_from_text(text)) == text == strategy.text()


def test_a_users_own_parallelism_can_be_read():
    table = {**PARALLELISMS, "data2": Words(make=lambda ways: Data(ways))}
    assert strategy_from_text("data2=4", table) == strategy_from_text("data=4")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "names no parallelism.  Known: data, stage, fsdp, expert, context, spatial, tensor"),
        ("remat=full", "names no parallelism"),
        ("fsdp", "'fsdp' is not of the form name=value"),
        ("fsdp=", "not of the form"),
        ("fsdp=4 fsdp=2", "'fsdp' is there twice"),
        ("fspd=4", "Unknown word in a strategy 'fspd'.  Did you mean 'fsdp'.  Known: data,"),
        ("fsdp=four", "fsdp takes a whole number"),
        ("fsdp=-4", "fsdp takes a whole number"),
        ("fsdp=0", "1 or more"),
        ("fsdp=4 accumulate=x", "accumulate takes a whole number"),
        ("fsdp=4 zero=4", "zero=4 is unknown"),
        ("context=4 method=tree", "method='tree' is unknown.  Known: 'ring', 'all_to_all'"),
        ("context=4 order=random", "order='random' is unknown"),
        ("context=4 method=all_to_all order=zigzag", "knows no order='zigzag'; leave order out"),
        ("data=4 order=zigzag", "order= is an option of context; add context=N"),
        ("data=4 zero=1", "zero= is an option of fsdp; add fsdp=N"),
        ("data=4 tensor=2 sequence=maybe", "Known: 'off', 'on'"),
    ],
)
def test_refuses(text, message):
    with pytest.raises(ConfigError, match=message):
        strategy_from_text(text)
