import jax
import numpy as np

from spmdlab.models.rope import rotation


def test_products_depend_only_on_the_distance():
    """One query and one key, put at every position: equal along each diagonal."""
    T, K = 16, 8
    q_K, k_K = jax.random.normal(jax.random.key(0), (2, K))
    rotate = rotation(np.arange(T), K, theta=100.0)
    q_TK, k_TK = (rotate(np.broadcast_to(x, (1, T, 1, K)))[0, :, 0] for x in (q_K, k_K))
    scores_TS = np.asarray(q_TK @ k_TK.T)
    for distance in range(-T + 1, T):
        diagonal = np.diagonal(scores_TS, distance)
        np.testing.assert_allclose(diagonal, diagonal[0], atol=1e-5)
    assert np.ptp(scores_TS[0]) > 0.1, "different distances must differ"


def test_turns_by_the_published_angle():
    """Pair 1 of 2 at position 3: 3 / theta ** (2 / 4)."""
    pair = np.array([0, 1, 0, 0], np.float32).reshape(1, 1, 1, 4)
    turned = rotation(np.arange(4), 4, theta=16.0)(pair)
    angle = 3 / 4
    np.testing.assert_allclose(
        turned[0, 3, 0], [0, np.cos(angle), 0, np.sin(angle)], rtol=1e-6, atol=1e-7
    )
