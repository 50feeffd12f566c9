"""Causal attention through JAX's own Pallas kernel for TPU (splash attention).

The kernel never holds the scores of all pairs and skips the masked half.  The partitioner cannot
look inside, so each device runs it on its own sequences and heads.  It exists for TPU: a program
lowered for anything else computes the same in plain JAX.

Dims:  B batch   T query length   S key length   H query heads   N key and value heads   K head size
"""

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp

from spmdlab.errors import ConfigError
from spmdlab.models.weights import Layout

Attend = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]

LANES = 128
"""The kernel's blocks are multiples of a vector register's lanes, and so are heads and lengths."""

LARGEST_BLOCK = 512
"""Queries and keys of one block: what MaxText uses by default (``sa_block_q`` and its kin)."""


def flash_attend(
    q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array, layout: Layout, otherwise: Attend
) -> jax.Array:
    """Returns causal attention, shaped like ``q_BTHK``.

    Args:
        q_BTHK: Queries.
        k_BSNK: Keys; query head h uses head ``h // (H / N)``.
        v_BSNK: Values.
        layout: Says how heads and batch are split.
        otherwise: The same function in plain JAX, for other platforms.

    Raises:
        ConfigError: Length or head size is no multiple of 128.
    """
    for what, size in (("batch.seq_len", q_BTHK.shape[1]), ("model.head_dim", q_BTHK.shape[3])):
        if size % LANES:
            raise ConfigError(
                f"attention='flash' needs {what} to be a multiple of {LANES}, got {size}; "
                "attention='dot' takes any."
            )
    heads = ("act_batch", "act_heads", "act_len", "act_head_dim")
    kv_heads = ("act_batch", "act_kv_heads", "act_len", "act_head_dim")

    def kernel(q_BTHK: jax.Array, k_BSNK: jax.Array, v_BSNK: jax.Array) -> jax.Array:
        q, k, v = (x.swapaxes(1, 2) for x in (q_BTHK, k_BSNK, v_BSNK))
        kv_axes = kv_heads
        if layout.ways("act_heads") != layout.ways("act_kv_heads"):
            # Whole keys beside split queries: each device must find its own ones.
            k, v = (jnp.repeat(x, q.shape[1] // x.shape[1], axis=1) for x in (k, v))
            kv_axes = heads
        run = layout.locally(_on_one_device, (heads, kv_axes, kv_axes), heads, checked=False)
        return run(q * q.shape[-1] ** -0.5, k, v).swapaxes(1, 2)

    return jax.lax.platform_dependent(q_BTHK, k_BSNK, v_BSNK, tpu=kernel, default=otherwise)


def _on_one_device(q_BHTK: jax.Array, k_BNSK: jax.Array, v_BNSK: jax.Array) -> jax.Array:
    # Imported here: it is slow, and only programs for TPU need it.
    from jax.experimental.pallas.ops.tpu.splash_attention import (
        splash_attention_kernel as splash,
        splash_attention_mask as masks,
    )

    T = q_BHTK.shape[2]
    block = math.gcd(T, LARGEST_BLOCK)
    sizes = splash.BlockSizes(
        **dict.fromkeys(("block_q", "block_kv", "block_kv_compute"), block),
        **dict.fromkeys(("block_q_dkv", "block_kv_dkv", "block_kv_dkv_compute"), block),
        **dict.fromkeys(("block_q_dq", "block_kv_dq"), block),
    )
    mask = masks.MultiHeadMask([masks.CausalMask((T, T))] * q_BHTK.shape[1])
    kernel = splash.make_splash_mha_single_device(mask, block_sizes=sizes)
    return jax.vmap(kernel)(q_BHTK, k_BNSK, v_BNSK)
