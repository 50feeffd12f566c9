"""One step of a strategy against one device's: arrays in, findings out.  NumPy alone."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

Arrays = Mapping[str, np.ndarray]
"""Path -> array."""

Cause = Literal[
    "reduced twice",
    "reduction missing",
    "shards permuted",
    "microbatch missing",
    "rng differs",
    "replicas differ",
    "wrong count",
    "unknown",
]

What = Literal["initial value", "loss", "gradient", "grad_norm", "update", "optimizer state"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Setting:
    """What the two sides share."""

    mesh_axes: Mapping[str, int]
    """Mesh axis -> size."""
    tolerance: float
    """Difference allowed, as a share of an array's largest element."""
    unit_roundoff: float
    accumulate: int = 1
    """Microbatches; row ``r`` of the batch is in microbatch ``r % accumulate``."""
    tokens_per_row: np.ndarray | None = None
    """Sum of the weights of each row of the batch."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Found:
    """What a strategy computed in one step, gathered whole."""

    loss: float
    grads: Arrays
    """Before clipping."""
    grad_norm: float
    state: Arrays
    """Parameters and optimizer state after the step; parameters begin with ``params.``."""
    copies: Mapping[str, Sequence[np.ndarray]] = dataclasses.field(default_factory=dict)
    """Path, of ``grads`` or ``state`` -> whole copies, where devices hold several and these are
    not equal to the bit."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Expected:
    """What one device computes from the same state and batch."""

    loss: float
    grads: Arrays
    before: Arrays
    """State before the step."""
    state: Arrays
    """State after it: one device's optimizer on the strategy's own gradients."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Evidence:
    """Experiments that are only made where something is wrong."""

    row_grads: Callable[[], Arrays] | None = None
    """Path -> [rows, ...]: what each row of the batch adds to one device's gradient."""
    agrees_without_dropout: Callable[[], bool] | None = None
    """Whether strategy and oracle agree with dropout switched off; None: there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Finding:
    """One number or array that is not what one device computes."""

    what: What
    path: str | None
    error: float
    """Largest difference, as a share of the largest element expected."""
    tolerance: float
    cause: Cause
    text: str
    """One line."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Difference:
    """How far an array is from what was expected."""

    path: str
    error: float
    """Largest difference, as a share of `scale`."""
    scale: float
    tolerance: float
    proves: bool = True
    """False where 0 was expected everywhere, which a step that does nothing gives as well."""

    @property
    def matches(self) -> bool:
        """Whether the difference is within the tolerance; of NaN it never is."""
        return self.error <= self.tolerance


def gradient_differences(found: Arrays, expected: Arrays, setting: Setting) -> list[Difference]:
    """Compares gradients, each by its own largest element.

    A gradient far below all others is noise (a bias that a softmax cancels, say): its scale is
    at least ``sqrt(u)`` of the largest gradient of all.

    Raises:
        ValueError: The two have other paths or shapes.
    """
    check_alike(found, expected)
    largest = max((largest_of(each) for each in expected.values()), default=0.0)
    floor = math.sqrt(setting.unit_roundoff) * largest
    differences = []
    for path, grad in expected.items():
        scale = largest_of(grad)
        one = difference(path, found[path], grad, setting.tolerance, max(scale, floor))
        differences.append(dataclasses.replace(one, proves=scale > 0))
    return differences


def state_differences(found: Arrays, expected: Expected, setting: Setting) -> list[Difference]:
    """Compares the state after a step.

    A parameter moves by far less than it is: the difference allowed is the tolerance's share of
    its largest update, and one rounding of the parameter itself.  Counters must be equal.
    """
    check_alike(found, expected.state)
    differences = []
    for path, wanted in expected.state.items():
        allowed, scale = setting.tolerance, largest_of(wanted)
        if not np.issubdtype(wanted.dtype, np.floating):
            allowed = 0.0
        elif path.startswith("params."):
            before = np.asarray(expected.before[path], np.float64)
            scale = largest_of(np.asarray(wanted, np.float64) - before)
            if scale:
                allowed += 2 * setting.unit_roundoff * largest_of(wanted) / scale
        differences.append(difference(path, found[path], wanted, allowed, scale))
    return differences


def initial_differences(found: Arrays, expected: Arrays, setting: Setting) -> list[Difference]:
    """Compares states before the first step: equal but for the last bits of a draw."""
    check_alike(found, expected)
    return [
        difference(path, found[path], wanted, 4 * setting.unit_roundoff, largest_of(wanted))
        for path, wanted in expected.items()
    ]


def scalar_difference(path: str, found: float, expected: float, tolerance: float) -> Difference:
    """Compares two numbers."""
    return difference(path, np.float64(found), np.float64(expected), tolerance, abs(expected))


def difference(path: str, found: Any, expected: Any, tolerance: float, scale: float) -> Difference:
    """Compares two arrays of one shape; ``scale`` 0 means that only zeros will do."""
    gap = largest_of(np.asarray(found, np.float64) - np.asarray(expected, np.float64))
    error = 0.0 if gap == 0 else gap / scale if scale else math.inf
    return Difference(path=path, error=error, scale=scale, tolerance=tolerance)


def copies_differ(path: str, copies: Sequence[np.ndarray], tolerance: float) -> bool:
    """Whether the copies that devices hold of one array are not the same."""
    largest = max(map(largest_of, copies))
    return any(
        not difference(path, copy, copies[0], tolerance, largest).matches for copy in copies[1:]
    )


def largest_of(array: Any) -> float:
    """Returns the largest magnitude; 0 of an empty array."""
    return float(np.max(np.abs(np.asarray(array, np.float64)), initial=0.0))


def check_alike(found: Arrays, expected: Arrays) -> None:
    """Raises ValueError unless both hold the same paths and shapes."""
    if found.keys() != expected.keys():
        odd = sorted(found.keys() ^ expected.keys())
        raise ValueError(f"only one side has {', '.join(odd[:5])}")
    for path, array in expected.items():
        if np.shape(found[path]) != np.shape(array):
            raise ValueError(f"{path} has shape {np.shape(found[path])}, not {np.shape(array)}")
