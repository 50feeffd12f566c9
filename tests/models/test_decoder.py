"""The decoder against one written again in NumPy and float64, from the papers."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from spmdlab.models.config import DecoderConfig
from spmdlab.models.params import apply, init_params

SIZES = {
    "vocab_size": 96,
    "num_layers": 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": 48,
    "compute_dtype": "float32",
}
TOKENS_BT = jax.random.randint(jax.random.key(1), (2, 12), 0, 96)

# Float32 against float64.  The longest sums have 48 terms (MLP), a dozen products follow one
# another; 48 * 12 roundings of 6e-8 each, all the same way, would be 4e-5 of logits near 1.
TOLERANCE = 4e-5


def norm(x, scale):
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + 1e-5) * scale


def turn(x_BTHK):
    """Multiplies each pair, as a complex number, by e to the i times position times rate."""
    half = x_BTHK.shape[-1] // 2
    rate = 10_000.0 ** (-np.arange(half) / half)
    phase_TR = np.exp(1j * np.arange(x_BTHK.shape[1])[:, None] * rate)
    z = (x_BTHK[..., :half] + 1j * x_BTHK[..., half:]) * phase_TR[:, None]
    return np.concatenate([z.real, z.imag], axis=-1)


def attention(x, p):
    T = x.shape[1]
    q, k, v = (np.einsum("btd,dhk->bthk", x, p[name]) for name in ("query", "key", "value"))
    group = q.shape[2] // k.shape[2]
    k, v = (np.repeat(y, group, axis=2) for y in (turn(k), v))
    scores = np.einsum("bthk,bshk->bhts", turn(q), k) / np.sqrt(q.shape[-1])
    weights = np.exp(scores) * np.tril(np.ones((T, T)))
    weights /= weights.sum(axis=-1, keepdims=True)
    return np.einsum("bhts,bshk,hkd->btd", weights, v, p["out"])


def mlp(x, p):
    up = x @ p["up"]
    if "gate" in p:
        gate = x @ p["gate"]
        return (gate / (1 + np.exp(-gate)) * up) @ p["down"]
    tanh = np.tanh(np.sqrt(2 / np.pi) * (up + 0.044715 * up**3))
    return (0.5 * up * (1 + tanh)) @ p["down"]


def reference(params, tokens_BT):
    x = params["embed"]["table"][tokens_BT]
    for layer in range(SIZES["num_layers"]):
        p = jax.tree.map(lambda w: w[layer], params["layers"])  # noqa: B023
        x = x + attention(norm(x, p["attention_norm"]["scale"]), p["attention"])
        x = x + mlp(norm(x, p["mlp_norm"]["scale"]), p["mlp"])
    x = norm(x, params["norm"]["scale"])
    return x @ (params["head"]["kernel"] if "head" in params else params["embed"]["table"].T)


@pytest.mark.parametrize(
    ("kind", "embeddings"), list(itertools.product(("gated", "plain"), ("tied", "untied")))
)
def test_equals_numpy(kind, embeddings):
    config = DecoderConfig(**SIZES, mlp=kind, embeddings=embeddings)
    params = init_params(config, jax.random.key(0))
    # Scales that are not all one, so that a scale left out shows.
    params["layers"]["mlp_norm"]["scale"] *= jnp.linspace(0.5, 2, 32)[None]
    params["norm"]["scale"] *= jnp.linspace(2, 0.5, 32)
    exact = jax.tree.map(lambda w: np.asarray(w, np.float64), params)
    logits = apply(config, params, TOKENS_BT)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(logits, reference(exact, np.asarray(TOKENS_BT)), atol=TOLERANCE)


def test_a_layer_drawn_in_a_stack_is_the_layer_drawn_alone():
    """Scanned and unrolled decoders have the same weights, bit for bit, and logits."""
    scanned, unrolled = (
        DecoderConfig(**SIZES, layers=layers) for layers in ("scanned", "unrolled")
    )
    stacked, alone = (init_params(config, jax.random.key(0)) for config in (scanned, unrolled))
    for layer in range(SIZES["num_layers"]):
        jax.tree.map(
            lambda s, a: np.testing.assert_array_equal(s[layer], a),  # noqa: B023
            stacked["layers"],
            alone["layers"][str(layer)],
        )
    first, second = jax.tree.leaves(stacked["layers"]["mlp"]["up"])[0]
    assert not np.array_equal(first, second), "layers must differ from one another"
    np.testing.assert_allclose(
        apply(scanned, stacked, TOKENS_BT), apply(unrolled, alone, TOKENS_BT), atol=TOLERANCE
    )


def test_looks_only_back():
    config = DecoderConfig(**SIZES)
    params = init_params(config, jax.random.key(0))
    changed = TOKENS_BT.at[:, 7].add(1) % 96
    before, after = (apply(config, params, tokens) for tokens in (TOKENS_BT, changed))
    np.testing.assert_array_equal(before[:, :7], after[:, :7])
    assert not np.allclose(before[:, 7:], after[:, 7:])


def test_bfloat16_products_give_float32_logits_near_the_exact_ones():
    config = DecoderConfig(**{**SIZES, "compute_dtype": "bfloat16"})
    params = init_params(config, jax.random.key(0))
    exact = apply(DecoderConfig(**SIZES), params, TOKENS_BT)
    logits = apply(config, params, TOKENS_BT)
    assert logits.dtype == jnp.float32
    assert 0 < np.abs(logits - exact).max() < 0.1  # 8 bits of 3, through two layers


def test_dropout_drops_only_with_a_key_and_keeps_the_mean():
    config = DecoderConfig(**SIZES, dropout=0.5)
    params = init_params(config, jax.random.key(0))
    plain = apply(config, params, TOKENS_BT)
    np.testing.assert_array_equal(plain, apply(DecoderConfig(**SIZES), params, TOKENS_BT))
    first, again, other = (
        apply(config, params, TOKENS_BT, dropout_key=jax.random.key(seed)) for seed in (0, 0, 1)
    )
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, plain)
    assert not np.allclose(first, other)
