"""A stack of two-matmul layers under four layouts: small enough to count by hand.

The dumps beside this file name its lines: after an edit, run make.py.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P

LAYERS, EMBED, MLP, BATCH, LEN = 3, 256, 512, 16, 64

# Layout -> mesh axes of eight devices; specs of up_LDF, of down_LFD and of x_BTD.
LAYOUTS = {
    "data": ({"data": 8}, P(), P(), P("data")),
    "fsdp": ({"fsdp": 8}, P(None, "fsdp"), P(None, None, "fsdp"), P("fsdp")),
    "tensor": ({"tensor": 8}, P(None, None, "tensor"), P(None, "tensor"), P()),
    "fsdp_tensor": (
        {"fsdp": 4, "tensor": 2},
        P(None, "fsdp", "tensor"),
        P(None, "tensor", "fsdp"),
        P("fsdp"),
    ),
}
# The same over two slices of eight, joined by DCN.
SLICED = ({"data": 2, "fsdp": 8}, P(None, "fsdp"), P(None, None, "fsdp"), P(("data", "fsdp")))


def lower(layout: str, devices: Sequence[Any], *, scanned: bool, remat: bool = True) -> Any:
    """Lowers one training step of the stack for eight devices, or twice eight if ``sliced``."""
    axes, up_spec, down_spec, x_spec = SLICED if layout == "sliced" else LAYOUTS[layout]
    shape = tuple(axes.values())
    if devices[0].platform == "cpu":
        grid = np.array(devices[:8]).reshape(shape)
    elif layout == "sliced":
        grid = mesh_utils.create_hybrid_device_mesh((1, 8), (2, 1), devices=devices)
    else:
        grid = mesh_utils.create_device_mesh(shape, devices=devices)
    mesh = Mesh(grid, tuple(axes))

    def layer(x_BTD, up_DF, down_FD):
        h_BTF = jax.nn.gelu(x_BTD @ up_DF.astype(jnp.bfloat16))  # the line of up
        y_BTD = h_BTF @ down_FD.astype(jnp.bfloat16)  # the line of down
        return jax.lax.with_sharding_constraint(x_BTD + y_BTD, NamedSharding(mesh, x_spec))

    if remat:
        layer = jax.checkpoint(layer)

    def loss(params, x_BTD):
        if scanned:
            body = lambda x_BTD, w: (layer(x_BTD, w["up"], w["down"]), None)  # noqa: E731
            x_BTD, _ = jax.lax.scan(body, x_BTD, params)
        else:
            for i in range(LAYERS):
                x_BTD = layer(x_BTD, params["up"][i], params["down"][i])
        return jnp.mean(x_BTD.astype(jnp.float32) ** 2)

    def step(state, x_BTD):
        value, grads = jax.value_and_grad(loss)(state["params"], x_BTD)
        params = jax.tree.map(lambda w, g: w - 0.1 * g, state["params"], grads)
        return {"params": params}, value

    def abstract(shape, spec, dtype):
        return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))

    params = {
        "up": abstract((LAYERS, EMBED, MLP), up_spec, jnp.float32),
        "down": abstract((LAYERS, MLP, EMBED), down_spec, jnp.float32),
    }
    x = abstract((BATCH, LEN, EMBED), x_spec, jnp.bfloat16)
    kept = {"params": {name: w.sharding for name, w in params.items()}}
    jitted = jax.jit(step, donate_argnums=0, out_shardings=(kept, None))
    return jitted.lower({"params": params}, x)
