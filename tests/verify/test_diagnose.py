"""Each pattern by name, on random arrays: no device takes part."""

import numpy as np
import pytest

from spmdlab.verify.compare import Evidence, Expected, Found, Setting
from spmdlab.verify.diagnose import judge_start, judge_step

ROWS = 8
TOKENS = np.array([1, 2, 3, 4, 5, 6, 7, 8.0])
RNG = np.random.default_rng(0)
SHARES = {"w": RNG.normal(size=(ROWS, 8, 6)), "v": RNG.normal(size=(ROWS, 16))}
GRADS = {path: share.sum(0) for path, share in SHARES.items()}
SETTING = Setting(
    mesh_axes={"data": 4, "tensor": 3},
    tolerance=1e-6,
    unit_roundoff=2.0**-53,
    accumulate=2,
    tokens_per_row=TOKENS,
)


def causes(grads, *, loss=1.0, copies=None, agrees=None, shares=True):
    found = Found(loss=loss, grads=grads, grad_norm=norm_of(grads), state={}, copies=copies or {})
    expected = Expected(loss=1.0, grads=GRADS, before={}, state={})
    evidence = Evidence(
        row_grads=(lambda: SHARES) if shares else None, agrees_without_dropout=agrees
    )
    findings = judge_step(found, expected, SETTING, evidence).findings
    return {each.cause for each in findings}, " | ".join(each.text for each in findings)


def norm_of(grads):
    return float(np.sqrt(sum(np.sum(np.square(grad)) for grad in grads.values())))


def weighted(coefficients):
    c = np.asarray(coefficients, float)
    return {path: np.tensordot(c, share, 1) for path, share in SHARES.items()}


def scaled(factor):
    return {path: factor * grad for path, grad in GRADS.items()}


def test_the_same_is_no_finding():
    assert causes(GRADS) == (set(), "")
    assert causes(scaled(1 + 1e-8)) == (set(), "")


@pytest.mark.parametrize(
    ("factor", "cause", "words"),
    [
        (4, "reduced twice", "summed twice over data"),
        (3, "reduced twice", "summed twice over tensor"),
        (12, "reduced twice", "summed twice over data and tensor"),
        (2, "reduced twice", "added up twice"),
        (1 / 4, "reduction missing", "exactly 1/4"),
        (1 / 12, "reduction missing", "over data and tensor"),
        (1 / 2, "wrong count", "divided twice by 2 microbatches"),
        (1.37, "unknown", "1.37 times"),
    ],
)
def test_a_factor(factor, cause, words):
    found, text = causes(scaled(factor))
    assert found == {cause}
    assert words in text


def test_a_single_parameter_is_named():
    found, text = causes({**GRADS, "v": 4 * GRADS["v"]})
    assert found == {"reduced twice"}
    assert "gradient of v" in text
    assert "gradient of w" not in text


@pytest.mark.parametrize(("dim", "order"), [(0, (1, 2, 3, 0)), (0, (3, 2, 1, 0))])
def test_shards_in_another_order(dim, order):
    blocks = np.split(GRADS["w"], 4, axis=dim)
    moved = np.concatenate([blocks[i] for i in order], axis=dim)
    found, text = causes({**GRADS, "w": moved})
    assert found == {"shards permuted"}
    assert f"4 shards of dim {dim} over data stand in order {', '.join(map(str, order))}" in text


def test_shards_of_the_last_dim_over_the_other_axis():
    blocks = np.split(GRADS["w"], 3, axis=1)
    found, text = causes({**GRADS, "w": np.concatenate([blocks[i] for i in (2, 0, 1)], axis=1)})
    assert found == {"shards permuted"}
    assert "3 shards of dim 1 over tensor" in text


def test_a_missing_microbatch():
    found, text = causes(weighted([1, 0] * 4))
    assert found == {"microbatch missing"}
    assert "microbatch 1 of 2 is missing" in text


def test_a_missing_microbatch_and_a_mean_over_the_rest():
    found, text = causes(weighted([0, 2] * 4))
    assert found == {"microbatch missing"}
    assert "microbatch 0 of 2 is missing, the others count 2 times" in text


def test_one_shard_of_the_batch_alone():
    found, text = causes(weighted([0, 0, 1, 1, 0, 0, 0, 0]))
    assert found == {"reduction missing"}
    assert "only shard of the batch 1 of 4 counts: not reduced over data" in text


def test_a_mean_of_means_by_microbatch():
    own = np.array([TOKENS[0::2].sum(), TOKENS[1::2].sum()])
    found, text = causes(weighted(np.tile(TOKENS.sum() / own / 2, 4)), loss=1.1)
    assert found == {"wrong count"}
    assert "each microbatch is averaged over its own tokens" in text


def test_a_loss_over_the_wrong_count():
    found, text = causes(scaled(0.7), loss=0.7)
    assert found == {"wrong count"}
    assert f"averaged over {36 / 0.7:.6g}, not over the batch's 36 tokens" in text


def test_copies_that_add_up():
    parts = [2 * GRADS["v"], -3 * GRADS["v"], 2 * GRADS["v"]]
    found, text = causes({**GRADS, "v": parts[0]}, copies={"v": parts})
    assert found == {"reduction missing"}
    assert "3 copies differ, and add up to what is right" in text


def test_copies_that_differ_though_the_first_is_right():
    found, text = causes(GRADS, copies={"v": [GRADS["v"], GRADS["v"] + 1, GRADS["v"]]})
    assert found == {"replicas differ"}
    assert "gradient of v" in text


def test_random_numbers():
    assert causes(weighted(RNG.normal(size=8)), agrees=lambda: True)[0] == {"rng differs"}
    assert causes(scaled(4), agrees=lambda: False)[0] == {"reduced twice"}


def test_no_pattern_is_said_to_be_none():
    noise = {path: RNG.normal(size=grad.shape) for path, grad in GRADS.items()}
    found, text = causes(noise)
    assert found == {"unknown"}
    assert "no multiple and no permutation" in text
    assert causes({**GRADS, "w": np.full_like(GRADS["w"], np.nan)})[0] == {"unknown"}


def test_experiments_are_only_made_where_something_is_wrong():
    def never():
        raise AssertionError

    found = Found(loss=1.0, grads=GRADS, grad_norm=norm_of(GRADS), state={})
    expected = Expected(loss=1.0, grads=GRADS, before={}, state={})
    evidence = Evidence(row_grads=never, agrees_without_dropout=never)
    assert judge_step(found, expected, SETTING, evidence).findings == []


def test_a_reported_norm_that_is_not_the_gradients():
    found = Found(loss=1.0, grads=GRADS, grad_norm=2 * norm_of(GRADS), state={})
    expected = Expected(loss=1.0, grads=GRADS, before={}, state={})
    [finding] = judge_step(found, expected, SETTING).findings
    assert finding.what == "grad_norm"
    assert finding.error == pytest.approx(1)


def test_initial_values_from_other_random_numbers():
    [finding] = judge_start({**GRADS, "v": RNG.normal(size=16)}, GRADS, SETTING).findings
    assert (finding.cause, finding.path) == ("rng differs", "v")
    assert judge_start(GRADS, GRADS, SETTING).findings == []
