"""When a run is given up.

A run has diverged where the loss or the gradient's norm is not finite, or where the loss has been
above `RATIO` times the lowest loss so far for `PATIENCE` steps in a row.  Every step counts, not
only those that are logged.
"""

import dataclasses
import math

RATIO = 3.0
PATIENCE = 20


@dataclasses.dataclass(kw_only=True)
class Guard:
    """Looks at the steps of a run, one after the other."""

    best: float = math.inf
    """The lowest loss so far."""

    high: int = 0
    """Steps in a row whose loss was too high."""

    def problem(self, loss: float, grad_norm: float) -> str | None:
        """Returns why the run has diverged with this step; None if it has not.

        >>> guard = Guard()
        >>> guard.problem(5.0, 1.0)
        >>> guard.problem(4.0, float("inf"))
        'grad_norm is inf'
        """
        if not math.isfinite(loss):
            return f"loss is {loss}"
        if not math.isfinite(grad_norm):
            return f"grad_norm is {grad_norm}"
        self.best = min(self.best, loss)
        self.high = self.high + 1 if loss > RATIO * self.best else 0
        if self.high >= PATIENCE:
            return (
                f"loss is {loss:.4g}, and for {self.high} steps has been above {RATIO:g} times "
                f"the lowest, {self.best:.4g}"
            )
        return None
