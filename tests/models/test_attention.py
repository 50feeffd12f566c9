import jax
import jax.numpy as jnp
import numpy as np

from spmdlab.models.attention import attend
from spmdlab.models.weights import Layout


def test_grouped_heads_equal_repeated_keys_and_values():
    """Query head h must use key head h // 3: neighbours share, as Llama lays them out."""
    keys = jax.random.split(jax.random.key(0), 3)
    q_BTHK = jax.random.normal(keys[0], (2, 8, 6, 4))
    k_BSNK, v_BSNK = (jax.random.normal(key, (2, 8, 2, 4)) for key in keys[1:])
    grouped = attend(q_BTHK, k_BSNK, v_BSNK, Layout())
    for head in range(6):
        alone = attend(
            q_BTHK[:, :, head : head + 1],
            k_BSNK[:, :, head // 3 : head // 3 + 1],
            v_BSNK[:, :, head // 3 : head // 3 + 1],
            Layout(),
        )
        np.testing.assert_allclose(grouped[:, :, head], alone[:, :, 0], rtol=1e-6, atol=1e-6)


def test_the_first_position_sees_itself_alone():
    k_BSHK = jax.random.normal(jax.random.key(0), (1, 4, 1, 2))
    v_BSHK = jnp.arange(8.0).reshape(1, 4, 1, 2)
    np.testing.assert_array_equal(attend(k_BSHK, k_BSHK, v_BSHK, Layout())[:, 0], v_BSHK[:, 0])
