"""For unit tests of your own: emulated devices, collectives counted, gradients compared.

devices = emulate_devices(8)      # in conftest.py, before JAX's first use

def test_fsdp_gathers_each_weight_once():
    assert_collectives(step.lower(state, batch), {"all-gather": {"fsdp": 14}}, mesh)

def test_sharded_loss_has_the_plain_ones_gradients():
    assert_same_gradients(plain_loss, sharded_loss, params, batch, reduction_length=1024)
"""

import collections
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import Mesh

from spmdlab.compile import RELAYS
from spmdlab.cost.ledger import Row, price
from spmdlab.errors import ConfigError, TargetError
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import axes_from_text, parse_topology, row_major_placement
from spmdlab.hlo.parse import parse
from spmdlab.targets import prepare_environment
from spmdlab.train.state import paths
from spmdlab.verify.compare import Evidence, Expected, Found, Setting
from spmdlab.verify.diagnose import judge_step
from spmdlab.verify.tolerance import UNIT_ROUNDOFF

Counts = Mapping[str, int | Mapping[str, int]]
"""Kind of collective -> how many run in one call, in all or by mesh axis (``"data+fsdp"``)."""

_MOST_SHOWN = 8


def emulate_devices(n: int) -> list[jax.Device]:
    """Returns ``n`` CPU devices; to be called before JAX's first use, best in ``conftest.py``.

    Calling it again is free, with the same number or fewer.

    Raises:
        TargetError: JAX has started with fewer devices, or on another platform than the CPU.
        ConfigError: ``n`` is no number of devices.
    """
    if isinstance(n, bool) or not isinstance(n, int) or n < 1:
        raise ConfigError(f"emulate_devices({n!r}): a whole number, 1 or more, is needed")
    prepare_environment([f"cpu:{n}"])
    found = jax.devices("cpu")
    if len(found) < n:
        raise TargetError(
            f"emulate_devices({n}): JAX gives {len(found)} CPU devices; call it before JAX's first "
            f"use, or set JAX_NUM_CPU_DEVICES={n}."
        )
    return found[:n]


def assert_collectives(
    step: Any,
    expected: Counts,
    mesh: Mesh | Mapping[str, int] | str,
    *,
    others: Literal["refuse", "ignore"] = "refuse",
) -> None:
    """Asserts how many collectives of each kind run in one call, and over which mesh axes.

    Loops are multiplied out.  On emulated devices no reduce-scatter is formed: XLA's CPU
    compiler writes an all-reduce and a slice.

    Args:
        step: Optimised HLO text, or anything whose ``as_text()`` is that
            (``jax.jit(f).lower(...).compile()``), or what ``jax.jit(f).lower(...)`` returns.
        expected: As in ``{"all-gather": {"fsdp": 14}, "all-reduce": 3}``.
        mesh: The mesh, or its axes and sizes, outermost first (``"fsdp=4 tensor=2"``).
        others: What to do with kinds and axes that are not in ``expected``.

    Raises:
        AssertionError: The counts differ; names the collectives that are too many.
        ConfigError: ``step`` or ``mesh`` is of no such kind.
        HloError: The text is no optimised HLO.
        ShardingError: The program does not run on such a mesh.
    """
    axes = _axes(mesh)
    size = 1
    for ways in axes.values():
        size *= ways
    place = row_major_placement(parse_topology(f"cpu:{size}"), axes)
    ledger = price(parse(_hlo_text(step)), chip("cpu"), place, relays=RELAYS)
    by_kind: dict[str, dict[str, list[Row]]] = collections.defaultdict(dict)
    for row in ledger.collectives:
        assert row.wire is not None
        by_kind[row.kind].setdefault(row.wire.axis_key, []).append(row)
    wrong = []
    for kind in dict.fromkeys([*expected, *by_kind]):
        wanted, found = expected.get(kind, {}), by_kind.get(kind, {})
        if isinstance(wanted, int):
            everything = [row for rows in found.values() for row in rows]
            wrong += _wrong(kind, None, wanted, everything)
            continue
        if others == "ignore":
            found = {axis: rows for axis, rows in found.items() if axis in wanted}
        for axis in dict.fromkeys([*wanted, *found]):
            wrong += _wrong(kind, axis, wanted.get(axis, 0), found.get(axis, []))
    if wrong:
        raise AssertionError("collectives differ from what was expected:\n" + "\n".join(wrong))


def _wrong(kind: str, axis: str | None, wanted: int, rows: list[Row]) -> list[str]:
    found = int(sum(row.count for row in rows))
    if found == wanted:
        return []
    over = f" over {axis}" if axis else ""
    lines = [f"  {kind}{over}: expected {wanted}, found {found}"]
    for row in rows[:_MOST_SHOWN]:
        what = row.parameter or row.op_name or row.name
        source = f" ({row.source})" if row.source else ""
        lines.append(f"    {int(row.count)} × {what}{source}")
    if len(rows) > _MOST_SHOWN:
        lines.append(f"    and {len(rows) - _MOST_SHOWN} more")
    return lines


def assert_same_gradients(
    loss_a: Callable[..., Any],
    loss_b: Callable[..., Any],
    params: Any,
    *args: Any,
    reduction_length: int,
    mesh: Mesh | Mapping[str, int] | str | None = None,
) -> None:
    """Asserts that two losses, and their gradients by the first argument, are the same.

    Two right answers lie at most ``reduction_length`` roundings apart, each of half a unit in
    the last place, as a share of the gradient's largest element; see `spmdlab.verify.tolerance`.

    Args:
        loss_a: ``(params, *args) -> scalar``, the one that is right.
        loss_b: The same in another way, on any mesh; jitted or not.
        params: Any tree of floating point arrays.
        args: What else both take.
        reduction_length: Terms of the longest sum behind one gradient element, such as the
            tokens of the batch.
        mesh: Where ``loss_b`` runs; lets the message say which axis a factor comes from.

    Raises:
        AssertionError: They differ; says by how much, and what kind of mistake does that.
        ConfigError: A leaf of ``params`` is of no dtype that can be compared, or ``mesh`` is none.
    """
    leaves = jax.tree.leaves(params)
    dtypes = {str(jax.numpy.asarray(leaf).dtype) for leaf in leaves}
    if odd := dtypes - UNIT_ROUNDOFF.keys():
        known = ", ".join(UNIT_ROUNDOFF)
        raise ConfigError(f"gradients in {', '.join(sorted(odd))} cannot be compared; use {known}")
    unit = max((UNIT_ROUNDOFF[dtype] for dtype in dtypes), default=UNIT_ROUNDOFF["float32"])
    (value_a, grads_a), (value_b, grads_b) = (
        jax.value_and_grad(loss)(params, *args) for loss in (loss_a, loss_b)
    )
    setting = Setting(
        mesh_axes={} if mesh is None else _axes(mesh),
        tolerance=reduction_length * unit,
        unit_roundoff=unit,
    )
    flat_a, flat_b = _flat(grads_a), _flat(grads_b)
    norm = float(np.sqrt(sum(np.sum(np.square(g, dtype=np.float64)) for g in flat_b.values())))
    found = Found(loss=float(value_b), grads=flat_b, grad_norm=norm, state={})
    expected = Expected(loss=float(value_a), grads=flat_a, before={}, state={})
    findings = judge_step(found, expected, setting, Evidence()).findings
    if findings:
        lines = [f"  {each.text} (off by {each.error:.2g} of its largest)" for each in findings]
        allowed = f"allowed: {setting.tolerance:.2g}, {reduction_length} roundings"
        raise AssertionError(f"gradients differ ({allowed}):\n" + "\n".join(lines))


def _flat(tree: Any) -> dict[str, np.ndarray]:
    names = jax.tree.leaves(paths(tree))
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(tree)]
    return dict(zip(names, leaves, strict=True))


def _axes(mesh: Mesh | Mapping[str, int] | str) -> dict[str, int]:
    if isinstance(mesh, str):
        return axes_from_text(mesh)
    shape = mesh if isinstance(mesh, Mapping) else getattr(mesh, "shape", None)
    if not isinstance(shape, Mapping):
        raise ConfigError(f"{mesh!r} is no mesh: pass a Mesh, a dict, or text like 'fsdp=4'")
    return {str(axis): int(size) for axis, size in shape.items()}


def _hlo_text(step: Any) -> str:
    if isinstance(step, str):
        return step
    if hasattr(step, "compile"):
        step = step.compile()
    if not hasattr(step, "as_text"):
        kind = type(step).__name__
        raise ConfigError(
            f"assert_collectives needs a compiled step, got {kind}: pass jax.jit(f).lower(...)"
        )
    return step.as_text()
