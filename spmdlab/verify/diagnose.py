"""From how a step is wrong to what made it wrong.  NumPy alone.

| what is seen | what it is called |
| --- | --- |
| copies of one array differ, their sum or mean is right | reduction missing |
| copies of one array differ otherwise | replicas differ |
| all is right once dropout is off | rng differs |
| loss and gradients off by one ratio, or each part by its own count | wrong count |
| exactly n or 2 times what it should be | reduced twice |
| exactly 1/n; or one device's share of the batch alone | reduction missing |
| blocks in another order | shards permuted |
| a microbatch's rows count for nothing | microbatch missing |
"""

import dataclasses
import math

import numpy as np

from spmdlab.verify.compare import (
    Arrays,
    Cause,
    Difference,
    Evidence,
    Expected,
    Finding,
    Found,
    Setting,
    What,
    copies_differ,
    difference,
    gradient_differences,
    initial_differences,
    largest_of,
    scalar_difference,
    state_differences,
)
from spmdlab.verify.patterns import (
    axis_products,
    near,
    permutation,
    ratio,
    row_coefficients,
    row_groups,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Verdict:
    """One step, compared."""

    differences: dict[What, list[Difference]]
    findings: list[Finding]


def judge_step(
    found: Found, expected: Expected, setting: Setting, evidence: Evidence | None = None
) -> Verdict:
    """Compares one step with one device's, and says what is wrong and why.

    Args:
        found: What the strategy computed.
        expected: What one device computes from the same state and batch.
        setting: The mesh, the batch, and the tolerance.
        evidence: Experiments to tell causes apart; each is made once, if at all.

    Raises:
        ValueError: The two sides have other arrays.
    """
    evidence = evidence or Evidence()
    squares = [np.sum(np.square(grad, dtype=np.float64)) for grad in found.grads.values()]
    norm = math.sqrt(sum(map(float, squares)))
    state = state_differences(found.state, expected, setting)
    differences: dict[What, list[Difference]] = {
        "loss": [scalar_difference("loss", found.loss, expected.loss, setting.tolerance)],
        "gradient": gradient_differences(found.grads, expected.grads, setting),
        "grad_norm": [scalar_difference("grad_norm", found.grad_norm, norm, setting.tolerance)],
        "update": [each for each in state if each.path.startswith("params.")],
        "optimizer state": [each for each in state if not each.path.startswith("params.")],
    }
    apart = {
        path for path, copies in found.copies.items()
        if copies_differ(path, copies, setting.tolerance)
    }  # fmt: skip
    doctor = _Doctor(found, expected, setting, evidence, apart)
    findings = [
        doctor.explain(what, each)
        for what, all_of_them in differences.items()
        for each in all_of_them
        if not each.matches or (each.path in apart and what not in ("loss", "grad_norm"))
    ]
    return Verdict(differences=differences, findings=findings)


def judge_start(found: Arrays, expected: Arrays, setting: Setting) -> Verdict:
    """Compares initial states, which must not depend on the mesh."""
    differences = initial_differences(found, expected, setting)
    findings = []
    for each in differences:
        if each.matches:
            continue
        cause, text = _of_one_array(found[each.path], expected[each.path], setting)
        if cause == "unknown":
            cause, text = "rng differs", "drawn from other random numbers than on one device"
        findings.append(_finding("initial value", each, cause, text))
    return Verdict(differences={"initial value": differences}, findings=findings)


def _finding(what: What, found: Difference, cause: Cause, text: str) -> Finding:
    path = None if what in ("loss", "grad_norm") else found.path
    return Finding(
        what=what,
        path=path,
        error=found.error,
        tolerance=found.tolerance,
        cause=cause,
        text=f"{what}{f' of {path}' if path else ''}: {text}",
    )


class _Doctor:
    """Explains the differences of one step."""

    def __init__(
        self,
        found: Found,
        expected: Expected,
        setting: Setting,
        evidence: Evidence,
        apart: set[str],
    ) -> None:
        self._found = found
        self._expected = expected
        self._setting = setting
        self._evidence = evidence
        self._apart = apart
        self._common: tuple[Cause, str] | None = None
        self._tried = False

    def explain(self, what: What, found: Difference) -> Finding:
        if what in ("loss", "gradient"):
            return _finding(what, found, *self._of_loss_and_gradients(what, found.path))
        if what == "grad_norm":
            return _finding(what, found, "unknown", _times(found) + " the norm of the gradients")
        if found.path in self._apart:
            return _finding(what, found, *self._of_copies(found.path, None))
        ours, theirs = self._found.state[found.path], self._expected.state[found.path]
        if what == "update":
            before = self._expected.before[found.path].astype(np.float64)
            ours, theirs = ours - before, theirs - before
        setting = dataclasses.replace(self._setting, tolerance=found.tolerance)
        cause, text = _of_one_array(ours, theirs, setting)
        if cause == "unknown":
            text = "not what one device's optimizer makes of the same gradients"
        return _finding(what, found, cause, text)

    def _of_loss_and_gradients(self, what: What, path: str) -> tuple[Cause, str]:
        if not self._tried:
            self._tried = True
            self._common = self._of_rng() or (None if self._apart else self._of_count())
        if self._common is not None:
            return self._common
        if what == "loss":
            r = self._found.loss / self._expected.loss if self._expected.loss else math.nan
            factor = _factor(r, self._setting)
            return factor if factor else ("unknown", f"{r:.6g} times one device's")
        if path in self._apart:
            return self._of_copies(path, self._expected.grads[path])
        cause, text = _of_one_array(
            self._found.grads[path], self._expected.grads[path], self._setting
        )
        if cause == "unknown" and (by_rows := self._of_rows()) is not None:
            return by_rows
        return cause, text

    def _of_copies(self, path: str, expected: np.ndarray | None) -> tuple[Cause, str]:
        copies = np.stack([np.asarray(copy, np.float64) for copy in self._found.copies[path]])
        many = len(copies)
        if expected is not None:
            scale, allowed = largest_of(expected), many * self._setting.tolerance
            for how, value in (("add up to", copies.sum(0)), ("average to", copies.mean(0))):
                if difference(path, value, expected, allowed, scale).matches:
                    text = (
                        f"never reduced: the devices' {many} copies differ, and {how} what is right"
                    )
                    return "reduction missing", text
        return "replicas differ", f"the devices' {many} copies of what should be one array differ"

    def _of_rng(self) -> tuple[Cause, str] | None:
        agrees = self._evidence.agrees_without_dropout
        if agrees is None or not agrees():
            return None
        text = "right without dropout: the devices draw other random numbers than one device"
        return "rng differs", text

    def _of_count(self) -> tuple[Cause, str] | None:
        """The loss is off, and all gradients with it."""
        s, found, expected = self._setting, self._found, self._expected
        if scalar_difference("loss", found.loss, expected.loss, s.tolerance).matches:
            return None
        r = found.loss / expected.loss if expected.loss else math.nan
        ratios = [
            ratio(grad, expected.grads[path], s.tolerance)
            for path, grad in found.grads.items()
            if largest_of(expected.grads[path])
        ]
        if all(each is not None and near(each, r) for each in ratios):
            return "wrong count", f"loss and all gradients are {r:.6g} times one device's" + (
                "" if s.tokens_per_row is None else self._count(r)
            )
        by_rows = self._of_rows()
        return by_rows if by_rows and by_rows[0] == "wrong count" else None

    def _count(self, r: float) -> str:
        assert self._setting.tokens_per_row is not None
        tokens = float(self._setting.tokens_per_row.sum())
        return f": averaged over {tokens / r:.6g}, not over the batch's {tokens:.6g} tokens"

    def _of_rows(self) -> tuple[Cause, str] | None:
        """How often each row of the batch counts, found by least squares."""
        if self._evidence.row_grads is None:
            return None
        shares = self._evidence.row_grads()
        c = row_coefficients(self._found.grads, shares, self._setting.tolerance)
        if c is None:
            return None
        for groups in row_groups(len(c), self._setting.accumulate, self._setting.mesh_axes):
            if any(np.ptp(c[rows]) > 0.05 for rows in groups.members):
                continue
            each = np.array([c[rows].mean() for rows in groups.members])
            if named := self._of_groups(each, groups.name, groups.axes, groups.members):
                return named
        counted = " ".join(f"{each:.3g}" for each in c[:16])
        return "unknown", f"rows of the batch count {counted} times"

    def _of_groups(
        self, each: np.ndarray, name: str, axes: str, members: tuple[np.ndarray, ...]
    ) -> tuple[Cause, str] | None:
        counts = np.round(each / each.max(), 1) if each.max() > 0 else each
        if (
            np.abs(each / max(each.max(), 1e-9) - counts).max() > 0.05
            or not np.isin(counts, (0, 1)).all()
        ):
            return self._of_means(each, name, members)
        missing = [str(index) for index, count in enumerate(counts) if count == 0]
        if not missing:
            return None
        if name == "microbatch":
            also = "" if near(each.max(), 1) else f", the others count {each.max():.3g} times"
            text = f"microbatch {', '.join(missing)} of {len(each)} is missing{also}"
            return "microbatch missing", text
        kept = [str(index) for index, count in enumerate(counts) if count]
        text = f"only {name} {', '.join(kept)} of {len(each)} counts: not reduced over {axes}"
        return "reduction missing", text

    def _of_means(
        self, each: np.ndarray, name: str, members: tuple[np.ndarray, ...]
    ) -> tuple[Cause, str] | None:
        tokens = self._setting.tokens_per_row
        if tokens is None:
            return None
        own = np.array([tokens[rows].sum() for rows in members], np.float64)
        r = each * own / tokens.sum() * len(own)
        if np.ptp(r) > 0.05 * r.mean() or np.ptp(own) == 0:
            return None
        text = f"each {name} is averaged over its own tokens, and then the {len(own)} averages are"
        return "wrong count", text


def _of_one_array(found: np.ndarray, expected: np.ndarray, setting: Setting) -> tuple[Cause, str]:
    r = ratio(found, expected, setting.tolerance)
    if r is not None and (factor := _factor(r, setting)):
        return factor
    blocks = dict.fromkeys([*axis_products(setting.mesh_axes), setting.accumulate])
    comparable = found.dtype.kind == "f" and largest_of(expected) > 0
    moved = permutation(found, expected, [*blocks], setting.tolerance) if comparable else None
    if moved is not None:
        order = ", ".join(map(str, moved.order))
        axes = axis_products(setting.mesh_axes).get(len(moved.order))
        over = f" over {axes}" if axes else ""
        text = f"the {len(moved.order)} shards of dim {moved.dim}{over} stand in order {order}"
        return "shards permuted", text
    if r is not None:
        return "unknown", f"{r:.6g} times one device's"
    return "unknown", "no multiple and no permutation of one device's"


def _factor(r: float, setting: Setting) -> tuple[Cause, str] | None:
    """Names a ratio that a reduction too many or too few brings in."""
    for many, axes in axis_products(setting.mesh_axes).items():
        if near(r, many):
            return "reduced twice", f"exactly {many} times one device's: summed twice over {axes}"
        if near(r, 1 / many):
            return "reduction missing", (
                f"exactly 1/{many} of one device's: averaged twice, or averaged instead of summed, "
                f"or never summed, over {axes}"
            )
    if near(r, 2):
        return "reduced twice", "exactly 2 times one device's: added up twice"
    if setting.accumulate > 1 and near(r, setting.accumulate):
        many = setting.accumulate
        return (
            "wrong count",
            f"exactly {many} times one device's: not divided by {many} microbatches",
        )
    if setting.accumulate > 1 and near(r, 1 / setting.accumulate):
        many = setting.accumulate
        return (
            "wrong count",
            f"exactly 1/{many} of one device's: divided twice by {many} microbatches",
        )
    return None


def _times(found: Difference) -> str:
    return f"off by {found.error:.3g} of"
