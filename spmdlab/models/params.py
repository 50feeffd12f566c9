"""A decoder's parameters as a plain nested dict, and the decoder as a function of them.

Everything outside `spmdlab.models` sees parameters in this form: names are the Flax paths
(``layers.mlp.gate``; unrolled: ``layers.0.mlp.gate``).
"""

from collections.abc import Mapping
from typing import Any

import jax
from flax import nnx

from spmdlab.models.config import DecoderConfig
from spmdlab.models.decoder import Decoder, Output

Params = dict[str, Any]
"""Nested dicts with arrays as leaves."""


def init_params(config: DecoderConfig, key: jax.Array) -> Params:
    """Returns fresh parameters.  The same for any layout; call it inside ``jax.jit``."""
    state = nnx.state(Decoder(config, rngs=nnx.Rngs(params=key)), nnx.Param)
    return _nested({path: param[...] for path, param in nnx.to_flat_state(state)})


def param_axes(config: DecoderConfig) -> Params:
    """Returns a dict shaped like the parameters, with tuples of logical axes as leaves."""
    state = nnx.split(abstract_decoder(config))[1]
    return _nested({path: tuple(p.logical_axes) for path, p in nnx.to_flat_state(state)})


def apply(config: DecoderConfig, params: Params, tokens_BT: jax.Array, **options: Any) -> jax.Array:
    """Returns ``Decoder(config)(tokens_BT, **options)`` with these parameters: the logits."""
    return run(config, params, tokens_BT, **options).logits_BTV


def run(config: DecoderConfig, params: Params, tokens_BT: jax.Array, **options: Any) -> Output:
    """Returns ``Decoder(config).run(tokens_BT, **options)`` with these parameters."""
    return filled(abstract_decoder(config), params).run(tokens_BT, **options)


def filled(module: nnx.Module, params: Params) -> Any:
    """Returns a decoder, or a part of one, with these parameters in place of its own."""
    graph, state = nnx.split(module)
    flat = [(path, param.replace(_at(params, path))) for path, param in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(flat))


def abstract_decoder(config: DecoderConfig) -> Decoder:
    """Returns a decoder with shapes for parameters."""
    return nnx.eval_shape(lambda: Decoder(config, rngs=nnx.Rngs(params=0)))


def _nested(flat: Mapping[tuple[Any, ...], Any]) -> Params:
    tree: Params = {}
    for path, leaf in flat.items():
        *parents, name = map(str, path)
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def _at(params: Params, path: tuple[Any, ...]) -> jax.Array:
    for name in path:
        params = params[str(name)]
    return params
