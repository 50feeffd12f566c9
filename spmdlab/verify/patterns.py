"""Shapes that a wrong array takes next to the right one.  NumPy alone."""

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence

import numpy as np

_NEAR = 0.02
"""How near a ratio must be to a simple number, as a share of it, to be called that number."""


def ratio(found: np.ndarray, expected: np.ndarray, tolerance: float) -> float | None:
    """Returns ``r`` where ``found`` is ``r * expected``; None where it is no multiple.

    >>> ratio(np.array([2.0, 4.0]), np.array([1.0, 2.0]), 1e-6)
    2.0
    """
    f, e = np.asarray(found, np.float64).ravel(), np.asarray(expected, np.float64).ravel()
    norm = float(e @ e)
    if not norm or not np.isfinite(f).all():
        return None
    r = float(f @ e) / norm
    gap = float(np.max(np.abs(f - r * e)))
    return r if gap <= tolerance * max(1.0, abs(r)) * float(np.max(np.abs(e))) else None


def axis_products(mesh_axes: Mapping[str, int]) -> dict[int, str]:
    """Returns the factors that reducing over mesh axes can bring in, with the axes' names.

    >>> axis_products({"data": 2, "fsdp": 4})
    {2: 'data', 4: 'fsdp', 8: 'data and fsdp'}
    """
    found: dict[int, str] = {}
    named = [(axis, size) for axis, size in mesh_axes.items() if size > 1]
    for many in range(1, len(named) + 1):
        for chosen in itertools.combinations(named, many):
            product = math.prod(size for _, size in chosen)
            text = " and ".join(axis for axis, _ in chosen)
            both = found.get(product)
            found[product] = f"{both}, or {text}" if both else text
    return found


def near(value: float, wanted: float) -> bool:
    """Whether a measured ratio can be called ``wanted``."""
    return abs(value - wanted) <= _NEAR * abs(wanted)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Permutation:
    """Blocks of an array in the wrong order."""

    dim: int
    order: tuple[int, ...]
    """Block ``i`` holds what belongs to block ``order[i]``."""


def permutation(
    found: np.ndarray, expected: np.ndarray, num_blocks: Sequence[int], tolerance: float
) -> Permutation | None:
    """Returns in which order the blocks of ``expected`` stand in ``found``, if that is all.

    Args:
        found: An array that is not ``expected``.
        expected: What it should be.
        num_blocks: Into how many blocks a dim may have been cut.
        tolerance: Difference allowed, as a share of the largest element.

    >>> permutation(np.array([3.0, 4, 1, 2]), np.array([1.0, 2, 3, 4]), [2], 1e-6).order
    (1, 0)
    """
    allowed = tolerance * float(np.max(np.abs(expected), initial=0.0))
    for many, dim in itertools.product(num_blocks, range(expected.ndim)):
        if many < 2 or expected.shape[dim] % many:
            continue
        ours, theirs = (np.split(each, many, axis=dim) for each in (found, expected))
        order = [
            next((j for j, b in enumerate(theirs) if np.max(np.abs(a - b)) <= allowed), -1)
            for a in ours
        ]
        if sorted(order) == list(range(many)) and order != sorted(order):
            return Permutation(dim=dim, order=tuple(order))
    return None


def row_coefficients(
    found: Mapping[str, np.ndarray], row_grads: Mapping[str, np.ndarray], tolerance: float
) -> np.ndarray | None:
    """Returns how often each row of the batch is counted in the gradients; None if not by rows.

    Args:
        found: Path -> gradient.
        row_grads: Path -> [rows, ...], each row's share of the right gradient.
        tolerance: Residual allowed, as a share of each gradient's largest share.
    """
    paths = [path for path in found if np.max(np.abs(row_grads[path]), initial=0.0) > 0]
    if not paths:
        return None
    rows, wanted = [], []
    for path in paths:
        scale = float(np.max(np.abs(row_grads[path])))
        rows.append(row_grads[path].reshape(len(row_grads[path]), -1).T.astype(np.float64) / scale)
        wanted.append(np.asarray(found[path], np.float64).ravel() / scale)
    matrix, vector = np.concatenate(rows), np.concatenate(wanted)
    if not np.isfinite(vector).all():
        return None
    coefficients, *_ = np.linalg.lstsq(matrix, vector, rcond=None)
    gap = float(np.max(np.abs(matrix @ coefficients - vector)))
    # Each row's share was had as a difference of whole gradients: n shares, n times the noise.
    allowed = tolerance * len(coefficients) * max(1.0, float(np.max(np.abs(coefficients))))
    return coefficients if gap <= allowed else None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class RowGroups:
    """One way in which a batch's rows are grouped."""

    name: str
    """What a group is: ``microbatch`` or ``shard of the batch``."""
    axes: str
    """Mesh axes that may hold the groups apart; "" of microbatches."""
    members: tuple[np.ndarray, ...]
    """Row numbers of each group."""


def row_groups(num_rows: int, accumulate: int, mesh_axes: Mapping[str, int]) -> list[RowGroups]:
    """Returns the ways in which a step cuts a batch: by microbatch, and by device."""
    rows = np.arange(num_rows)
    found = []
    if accumulate > 1 and num_rows % accumulate == 0:
        members = tuple(rows[m::accumulate] for m in range(accumulate))
        found.append(RowGroups(name="microbatch", axes="", members=members))
    for many, axes in axis_products(mesh_axes).items():
        if num_rows % many == 0:
            members = tuple(np.split(rows, many))
            found.append(RowGroups(name="shard of the batch", axes=axes, members=members))
    return found
