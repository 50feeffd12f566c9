"""How far two right answers may lie apart, from the number of roundings behind them.

Strategies add the same terms in another order.  With unit roundoff ``u`` (2^-24 for float32,
2^-53 for float64), a sum of ``n`` terms is off by at most ``n * u`` times its largest partial sum
when every rounding goes the same way, and by about ``sqrt(n) * u`` when they go as they please
(Higham, Accuracy and Stability of Numerical Algorithms, section 4.2).  We allow ``n * u`` of an
array's largest element; the factor ``sqrt(n)`` between the two is the room that terms which
cancel need.  ``n`` is the longest chain of roundings behind one element of a gradient:

* the sum over the batch's tokens that every weight's gradient is,
* per layer, twice (forward and backward), the sums over the model width, the heads, the
  feed-forward width and the sequence,
* twice, the sums over the vocabulary and the model width in the head,
* what reading the gradient back from Adam's first moment costs: ``2 / (1 - b1)``.

A fault worth the name moves a gradient by its own size over the number of devices or more, so a
tolerance that is not far below that proves nothing: see `blind_spot`.
"""

import math

from spmdlab.workload import Workload

UNIT_ROUNDOFF = {"float32": 2.0**-24, "float64": 2.0**-53}


def num_roundings(workload: Workload, num_devices: int) -> int:
    """Returns the longest chain of roundings behind one element of a gradient.

    >>> from spmdlab.models.config import DecoderConfig
    >>> from spmdlab.workload import BatchConfig
    >>> model = DecoderConfig(vocab_size=64, num_layers=2, embed_dim=32, num_heads=8,
    ...                       num_kv_heads=8, head_dim=4, mlp_dim=64)
    >>> load = Workload(model=model, batch=BatchConfig(global_batch=16, seq_len=16))
    >>> num_roundings(load, 8) == 16 * 16 + 2 * 2 * (32 + 32 + 64 + 16) + 2 * (64 + 32) + 20
    True
    """
    model, batch = workload.model, workload.batch
    tokens = workload.global_batch(num_devices) * batch.seq_len
    layer = model.embed_dim + model.num_heads * model.head_dim + model.mlp_dim + batch.seq_len
    head = model.vocab_size + model.embed_dim
    read_back = math.ceil(round(2 / (1 - workload.optimizer.b1), 6))
    return tokens + 2 * model.num_layers * layer + 2 * head + read_back


def tolerance(num_roundings: int, dtype: str) -> float:
    """Returns the difference allowed, as a share of an array's largest element."""
    return num_roundings * UNIT_ROUNDOFF[dtype]


def blind_spot(tolerance: float, num_parts: int) -> str | None:
    """Says so if the tolerance could hide one of ``num_parts`` missing; None if it cannot."""
    if tolerance * 4 < 1 / num_parts:
        return None
    return (
        f"the tolerance, {tolerance:.1g}, could hide one part of {num_parts}: "
        "use float64, or a smaller batch"
    )
