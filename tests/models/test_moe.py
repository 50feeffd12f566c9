"""One layer of experts: against every token computed on its own, and routing by hand."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from spmdlab.errors import ConfigError
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.models.moe import Moe, load_balance, mixing_weights, places, ranks
from spmdlab.models.weights import Layout

B, T, D, F, E = 3, 8, 16, 24, 4
SIZES = {
    "vocab_size": 32,
    "num_layers": 1,
    "embed_dim": D,
    "num_heads": 2,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mlp_dim": F,
    "compute_dtype": "float32",
}

# The longest sums are weights' gradients over all tokens: B * T float32 roundings, all the same
# way, behind three products of at most F terms.  Relative to the largest value.
TOLERANCE = (B * T + 2 * D + F) * float(np.finfo(np.float32).eps) / 2


def layer(mlp="gated", compute_dtype="float32", **moe) -> Moe:
    config = DecoderConfig(
        **{**SIZES, "mlp": mlp, "compute_dtype": compute_dtype},
        moe=MoeConfig(**{"num_experts": E, **moe}),
    )
    return Moe(config, rngs=nnx.Rngs(params=jax.random.key(0)))


def inputs(dtype="float32"):
    return jax.random.normal(jax.random.key(1), (B, T, D), dtype)


def weights_of(moe):
    return {path[-1]: p[...] for path, p in nnx.to_flat_state(nnx.state(moe, nnx.Param))}


def run(moe, weights, x_BTD):
    graph, state = nnx.split(moe)
    filled = [(path, p.replace(weights[path[-1]])) for path, p in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(filled))(x_BTD, Layout())


def reference(weights, x_BTD, num_chosen):
    """Each token alone: a softmax over its chosen logits, and its experts' own matrices."""

    def token(x_D):
        logits, chosen = jax.lax.top_k(x_D @ weights["router"], num_chosen)
        mix = jax.nn.softmax(logits)
        if num_chosen == 1:
            mix = jnp.max(jax.nn.softmax(x_D @ weights["router"]))[None]
        y_D = jnp.zeros_like(x_D)
        for k in range(num_chosen):
            own = {name: w[chosen[k]] for name, w in weights.items() if name != "router"}
            up_F = x_D @ own["up"]
            h_F = jax.nn.silu(x_D @ own["gate"]) * up_F if "gate" in own else jax.nn.gelu(up_F)
            y_D += mix[k] * (h_F @ own["down"])
        return y_D

    return jax.vmap(jax.vmap(token))(x_BTD)


ROOMY = {
    "dropless": {"dispatch": "dropless"},
    # E / k times its share is the whole group: there is a place for every token.
    "capacity": {"dispatch": "capacity", "capacity_factor": E / 2},
    "capacity_in_groups": {"dispatch": "capacity", "capacity_factor": E / 2, "group_size": 4},
}


@pytest.mark.parametrize("mlp", ["gated", "plain"])
@pytest.mark.parametrize("moe", ROOMY.values(), ids=ROOMY)
def test_without_drops_it_is_every_token_through_its_own_experts(moe, mlp):
    """Values and all gradients: of the router, of every expert and of what comes in."""
    moe = layer(mlp, **moe)
    weights, x_BTD = weights_of(moe), inputs()
    probe_BTD = jax.random.normal(jax.random.key(2), x_BTD.shape)
    ours, (grads, dx) = jax.value_and_grad(
        lambda w, x: jnp.sum(run(moe, w, x)[0] * probe_BTD), argnums=(0, 1)
    )(weights, x_BTD)
    theirs, (expected, dx_expected) = jax.value_and_grad(
        lambda w, x: jnp.sum(reference(w, x, 2) * probe_BTD), argnums=(0, 1)
    )(weights, x_BTD)
    scale = float(jnp.sum(jnp.abs(reference(weights, x_BTD, 2) * probe_BTD)))
    assert float(ours) == pytest.approx(float(theirs), abs=TOLERANCE * scale)
    for name, value in {**expected, "x": dx_expected}.items():
        largest = float(jnp.abs(value).max())
        assert largest > 0, name
        found = {**grads, "x": dx}[name]
        np.testing.assert_allclose(found, value, atol=TOLERANCE * largest, err_msg=name)
    assert float(run(moe, weights, x_BTD)[1].dropped_fraction) == 0


def test_a_tokens_only_expert_keeps_its_probability_so_that_the_router_learns():
    moe = layer(experts_per_token=1, dispatch="dropless")
    weights, x_BTD = weights_of(moe), inputs()
    y_BTD, _ = run(moe, weights, x_BTD)
    expected = reference(weights, x_BTD, 1)
    np.testing.assert_allclose(y_BTD, expected, atol=TOLERANCE * float(jnp.abs(expected).max()))
    grads = jax.grad(lambda w: jnp.sum(run(moe, w, x_BTD)[0]))(weights)
    assert float(jnp.abs(grads["router"]).max()) > 1e-3


# Probabilities of one group of four tokens for three experts, and what follows by hand:
#   token 0: A then B     token 1: A then C     token 2: B then A     token 3: A then B
PROBS_BNSE = jnp.array([[0.6, 0.3, 0.1], [0.5, 0.1, 0.4], [0.3, 0.6, 0.1], [0.7, 0.2, 0.1]])[
    None, None
]
RANKS = [[1, 2, 0], [1, 0, 2], [2, 1, 0], [1, 2, 0]]


def test_ranks_by_hand():
    np.testing.assert_array_equal(ranks(PROBS_BNSE, 2)[0, 0], RANKS)
    np.testing.assert_array_equal(ranks(jnp.ones((1, 1, 1, 3)) / 3, 2)[0, 0], [[1, 2, 0]])


def test_weights_of_the_chosen_add_up_to_one():
    weights = mixing_weights(PROBS_BNSE, ranks(PROBS_BNSE, 2), 2)[0, 0]
    expected = [[2 / 3, 1 / 3, 0], [5 / 9, 0, 4 / 9], [1 / 3, 2 / 3, 0], [7 / 9, 2 / 9, 0]]
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("capacity", "expected"),
    [
        # A: tokens 0, 1, 3 as first choices, then 2 as a second.  B: 2 first, then 0, 3.  C: 1.
        (4, [[1, 2, 0], [2, 0, 1], [4, 1, 0], [3, 3, 0]]),
        (2, [[1, 2, 0], [2, 0, 1], [0, 1, 0], [0, 0, 0]]),
        (1, [[1, 0, 0], [0, 0, 1], [0, 1, 0], [0, 0, 0]]),
    ],
)
def test_places_by_hand(capacity, expected):
    """First choices come before second ones; among equals the earlier token."""
    np.testing.assert_array_equal(places(jnp.array(RANKS)[None, None], 2, capacity)[0, 0], expected)


@pytest.mark.parametrize(("factor", "kept"), [(1.0, 4), (0.5, 2), (0.75, 3), (2.0, 8)])
def test_counts_what_is_dropped(factor, kept):
    """Equal tokens all choose the same two experts: of 8 choices of each, C find a place."""
    moe = layer(capacity_factor=factor)
    x_BTD = jnp.ones((B, T, D))
    y_BTD, routing = run(moe, weights_of(moe), x_BTD)
    assert float(routing.dropped_fraction) == pytest.approx(1 - kept / T)
    # The first tokens keep both of their experts; the rest get nothing, and nobody else's.
    y = np.abs(y_BTD).max(axis=-1)
    assert (y[:, :kept] > 0).all()
    assert (y[:, kept:] == 0).all()
    full = reference(weights_of(moe), x_BTD, 2)
    np.testing.assert_allclose(y_BTD[:, :kept], full[:, :kept], atol=1e-5)


def test_groups_are_parts_of_a_sequence():
    """Two groups drop what two sequences of half the length drop."""
    moe = layer(capacity_factor=0.5, group_size=4)
    x_BTD = inputs()
    y_BTD, routing = run(moe, weights_of(moe), x_BTD)
    halves = x_BTD.reshape(2 * B, T // 2, D)
    y_halves, same = run(layer(capacity_factor=0.5), weights_of(moe), halves)
    np.testing.assert_array_equal(y_BTD.reshape(halves.shape), y_halves)
    assert float(routing.dropped_fraction) == float(same.dropped_fraction) > 0


def test_load_balance_by_hand():
    """1 where experts share equally; the number of experts where one gets all."""
    config = MoeConfig(num_experts=2, experts_per_token=1)
    even = jnp.full((2, 1, 4, 2), 0.5)
    to_first = jnp.zeros((2, 1, 4, 2)).at[..., 0].set(1)
    # Each sequence all to an expert of its own: even over both, as uneven as can be in each.
    apart = to_first.at[1].set(to_first[1, ..., ::-1])
    split = jnp.broadcast_to(jnp.eye(2)[jnp.array([0, 1, 0, 1])][None, None], (2, 1, 4, 2))
    by_group = dataclasses.replace(config, load_balance_over="group")
    for probs, over_batch, over_group in [
        (even, 1, 1),
        (split, 1, 1),
        (to_first, 2, 2),
        (apart, 1, 2),
    ]:
        assert float(load_balance(probs, ranks(probs, 1), config)) == over_batch
        assert float(load_balance(probs, ranks(probs, 1), by_group)) == over_group


def test_the_router_sees_differences_below_bfloat16s():
    """Logits of 8 and 8 + 2**-6: in 8 bits the same, and then expert 0 would win."""
    moe = layer(compute_dtype="bfloat16", experts_per_token=1, dispatch="dropless")
    weights = weights_of(moe)
    router = jnp.zeros((D, E)).at[:, 0].set(0.5).at[:, 1].set(0.5).at[0, 1].add(2**-6)
    down = weights["down"].at[0].set(0)
    y_BTD, _ = run(
        moe, {**weights, "router": router, "down": down}, jnp.ones((B, T, D), "bfloat16")
    )
    assert y_BTD.dtype == jnp.bfloat16
    assert float(jnp.abs(y_BTD).max()) > 0


def test_refuses_a_group_that_does_not_divide_the_sequence():
    moe = layer(group_size=3)
    with pytest.raises(
        ConfigError, match=r"group_size \(3\) must divide the sequence length \(8\)"
    ):
        run(moe, weights_of(moe), inputs())
