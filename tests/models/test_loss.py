import jax
import numpy as np

from spmdlab.models.loss import cross_entropy


def test_is_minus_the_log_probability_of_the_target():
    logits = np.random.default_rng(0).normal(size=(2, 3, 5)).astype(np.float32)
    targets = np.array([[0, 4, 2], [1, 1, 3]], np.int32)
    probs = np.exp(logits.astype(np.float64))
    probs /= probs.sum(-1, keepdims=True)
    expected = [[-np.log(probs[b, t, targets[b, t]]) for t in range(3)] for b in range(2)]
    np.testing.assert_allclose(cross_entropy(logits, targets), expected, rtol=1e-6)


def test_gradient_is_probability_minus_one_at_the_target():
    logits = np.random.default_rng(0).normal(size=(1, 1, 5)).astype(np.float32)
    grad = jax.grad(lambda x: cross_entropy(x, np.array([[2]], np.int32)).sum())(logits)
    expected = np.exp(logits[0, 0]) / np.exp(logits[0, 0]).sum() - np.eye(5)[2]
    np.testing.assert_allclose(grad[0, 0], expected, atol=1e-6)


def test_large_logits_do_not_overflow():
    logits = np.array([[[1e4, 0.0, -1e4]]], np.float32)
    assert cross_entropy(logits, np.array([[1]], np.int32))[0, 0] == 1e4
