"""The tolerance follows from the sizes."""

import pytest

from spmdlab.models.config import DecoderConfig
from spmdlab.verify.tolerance import blind_spot, num_roundings, tolerance
from spmdlab.workload import BatchConfig, Workload

SIZES = {"vocab_size": 64, "num_layers": 2, "embed_dim": 32, "num_heads": 8, "num_kv_heads": 8,
         "head_dim": 4, "mlp_dim": 64}  # fmt: skip


def roundings(batch, **changes):
    model = DecoderConfig(**{**SIZES, **changes})
    return num_roundings(Workload(model=model, batch=BatchConfig(**batch)), 8)


def test_grows_with_every_sum():
    batch = {"global_batch": 16, "seq_len": 16}
    base = roundings(batch)
    assert roundings(batch, num_layers=3) - base == 2 * (32 + 8 * 4 + 64 + 16)
    assert roundings(batch, vocab_size=65) - base == 2
    assert roundings({**batch, "global_batch": 17}) - base == 16
    assert roundings({"per_device_batch": 2, "seq_len": 16}) == base


@pytest.mark.parametrize(("dtype", "unit"), [("float32", 2.0**-24), ("float64", 2.0**-53)])
def test_is_in_units_of_the_dtype(dtype, unit):
    assert tolerance(1000, dtype) == 1000 * unit


def test_says_when_it_could_hide_a_fault():
    assert blind_spot(0.01, 8) is None
    assert "could hide one part of 8: use float64" in blind_spot(0.05, 8)
