"""The two vocabularies.  Arrays have dims, named by logical axes; the mesh has axes."""

WEIGHT_AXES = {
    "embed": "model width",
    "mlp": "hidden width of the feed-forward layer",
    "heads": "query heads",
    "kv_heads": "key and value heads",
    "head_dim": "width of one head",
    "vocab": "token ids",
    "norm": "model width of a norm's scale; kept apart because it is small and stays whole",
    "expert": "experts of a mixture",
    "router": "experts a router chooses from; kept apart because it is small and stays whole",
    "layers": "layers stacked for a scan",
}
"""Dims of weights, of their gradients and of their optimizer state."""

ACTIVATION_AXES = {
    # Kept apart from the weights', because one strategy may split a weight's width
    # over the very mesh axis that already splits the batch.
    "act_batch": "sequences",
    "act_len": "tokens of a sequence, inside attention and feed-forward",
    "act_res_len": "tokens of a sequence in the residual stream between blocks",
    "act_height": "rows of an image",
    "act_width": "columns of an image",
    "act_embed": "model width",
    "act_heads": "query heads",
    "act_kv_heads": "key and value heads",
    "act_head_dim": "width of one head",
    "act_mlp": "hidden width of the feed-forward layer",
    "act_vocab": "token ids (logits)",
    "act_expert": "experts, inside a mixture",
    "act_expert_batch": "sequences, inside a mixture, where experts take devices from the batch",
    "act_router": "experts a token can go to (router's logits)",
}
"""Dims of activations and of the batch."""

LOGICAL_AXES = WEIGHT_AXES | ACTIVATION_AXES
"""Every name a dim can have, with a phrase."""

MESH_AXES = {
    "data": "replicas, each holding every weight",
    "stage": "groups of layers, one after the other",
    "fsdp": "data parallel, weights split and gathered on use",
    "expert": "experts on different devices",
    "context": "a sequence's tokens split through attention",
    "spatial": "an image's rows split",
    "tensor": "a layer's width split, activations exchanged",
}
"""Every axis of ours, outermost first: what talks least goes over the slowest links."""


def mesh_order(axis: str) -> tuple[int, str]:
    """Sorts mesh axes, outermost first.

    An axis of a user's own goes inside ``spatial`` and outside ``tensor``; several of them
    go by name, so that the order never depends on how a strategy was written.

    >>> sorted(["tensor", "ring", "data", "alpha"], key=mesh_order)
    ['data', 'alpha', 'ring', 'tensor']
    """
    known = list(MESH_AXES)
    if axis in MESH_AXES and axis != "tensor":
        return known.index(axis), ""
    return (len(known), "") if axis == "tensor" else (len(known) - 1, axis)
