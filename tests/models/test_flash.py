"""Attention through the Pallas kernel: the same function, and right where heads are split."""

import jax
import jax.numpy as jnp
import pytest

from spmdlab.errors import ConfigError
from spmdlab.models.attention import attend, flash
from spmdlab.models.flash import _on_one_device
from spmdlab.models.weights import Layout


def arrays(T, H, N, K):
    keys = jax.random.split(jax.random.key(0), 3)
    shapes = ((2, T, H, K), (2, T, N, K), (2, T, N, K))
    return [jax.random.normal(k, s, jnp.float32) for k, s in zip(keys, shapes, strict=True)]


def test_elsewhere_than_on_tpu_it_is_plain_attention():
    q, k, v = arrays(128, 4, 2, 128)
    assert jnp.array_equal(flash(q, k, v, Layout()), attend(q, k, v, Layout()))


@pytest.mark.parametrize(
    ("T", "K", "named"),
    [(100, 128, "batch.seq_len"), (128, 64, "model.head_dim")],
)
def test_refuses_what_the_kernel_cannot_do(T, K, named):
    with pytest.raises(ConfigError, match=f"{named} to be a multiple of 128"):
        flash(*arrays(T, 2, 2, K), Layout())


def test_the_kernel_computes_what_plain_attention_does(monkeypatch):
    """Run by Pallas's interpreter: grouped queries, forwards and backwards.

    Both sum up to T = 256 terms of float32, in other orders.
    """
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash

    make = splash.make_splash_mha_single_device
    monkeypatch.setattr(
        splash, "make_splash_mha_single_device", lambda *a, **k: make(*a, interpret=True, **k)
    )
    q, k, v = arrays(256, 4, 2, 128)

    def kernel(q, k, v):
        turned = (x.swapaxes(1, 2) for x in (q * q.shape[-1] ** -0.5, k, v))
        return _on_one_device(*turned).swapaxes(1, 2)

    def loss(attention, arrays):
        return jnp.sum(jnp.sin(attention(*arrays)))

    plain = jax.value_and_grad(lambda arrays: loss(lambda *a: attend(*a, Layout()), arrays))
    got, want = jax.value_and_grad(lambda arrays: loss(kernel, arrays))((q, k, v)), plain((q, k, v))
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        assert jnp.max(jnp.abs(a - b)) <= 256 * jnp.finfo(jnp.float32).eps * jnp.max(jnp.abs(b))
