"""Any product of parallelisms over any small model: one device's gradients, or a refusal.

A refusal is one line that names a size of the config, with its value.  Nothing else will do: no
other exception, and no gradient that differs.

    pytest tests/verify/test_random_products.py --hypothesis-profile=long

tries many more, and others in every run.
"""

import math
import re
from typing import Any

import jax
from hypothesis import HealthCheck, Phase, event, given, settings, strategies as st

from spmdlab.axes import LOGICAL_AXES
from spmdlab.compile import jitted_step, lay_out
from spmdlab.config import Experiment
from spmdlab.errors import ConfigError, ShardingError
from spmdlab.models.config import DecoderConfig, MoeConfig
from spmdlab.strategies import Strategy, strategy_from_text
from spmdlab.targets import parse_target
from spmdlab.train.state import abstract_batch, abstract_state
from spmdlab.verify.run import verify_strategy
from spmdlab.workload import BatchConfig, Workload

LONG = settings.get_current_profile_name() == "long"
EXAMPLES = {"traced": 400, "run": 200} if LONG else {"traced": 16, "run": 3}
COMMON = {
    "deadline": None,
    # Each example traces or compiles a step: slow by nature, and too slow to be made smaller.
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate),
}

MESHES = [(2,), (4,), (2, 2), (6,), (2, 3), (3, 2), (8,), (2, 4), (4, 2), (2, 2, 2)]
PIPELINES = [
    f" schedule={schedule} microbatches={number}"
    for schedule in ("gpipe", "1f1b", "circular")
    for number in (1, 2, 3, 4)
]
OPTIONS = {
    "data": [""],
    "stage": PIPELINES,
    "fsdp": ["", " zero=2", " zero=1"],
    "expert": [""],
    "context": ["", " order=contiguous", " method=all_to_all"],
    "tensor": ["", " sequence=on", " kv=replicate", " sequence=on kv=replicate"],
}
LARGEST = {
    "num_layers": 4 if LONG else 2,
    "embed_dim": 32,
    "num_heads": 4,
    "num_kv_heads": 4,
    "mlp_dim": 32,
    "vocab_size": 64,
    "seq_len": 32,
    "global_batch": 16,
    "num_experts": 6,
}
SMALLEST = {"embed_dim": 8, "mlp_dim": 8, "vocab_size": 16, "seq_len": 4}


@st.composite
def products(draw: st.DrawFn) -> str:
    """A product as it is written on the command line."""
    ways = draw(st.sampled_from(MESHES))
    axes = draw(st.permutations(sorted(OPTIONS)))[: len(ways)]
    words = [
        f"{axis}={n}{draw(st.sampled_from(OPTIONS[axis]))}"
        for axis, n in zip(axes, ways, strict=True)
    ]
    words.append("remat=" + draw(st.sampled_from(["none", "full", "dots", "names"])))
    words.append(f"accumulate={draw(st.sampled_from([1, 1, 2, 3]))}")
    return " ".join(words)


@st.composite
def experiments(draw: st.DrawFn, strategy: Strategy, broken: int) -> Experiment:
    """A small model and batch whose sizes divide as they must, but for ``broken`` of them."""
    needed = divisors(strategy)
    for name in draw(st.lists(st.sampled_from(sorted(needed)), max_size=broken, unique=True)):
        needed[name] = 1

    def size(name: str) -> int:
        step = needed[name]
        first = -(-SMALLEST.get(name, 1) // step) * step
        return draw(st.sampled_from(range(first, max(first, LARGEST[name]) + 1, step)))

    sizes = {name: size(name) for name in LARGEST}
    # Query heads are few, but as many as key and value heads can share.
    sizes["num_heads"] = math.lcm(needed["num_heads"], sizes["num_kv_heads"])
    num_experts = sizes.pop("num_experts")
    moe = MoeConfig(
        num_experts=num_experts,
        experts_per_token=draw(st.integers(1, min(2, num_experts))),
        dispatch=draw(st.sampled_from(["capacity", "dropless"])),
        capacity_factor=draw(st.sampled_from([0.5, 1.25])),
        load_balance_over=draw(st.sampled_from(["batch", "group"])),
    )
    batch = BatchConfig(seq_len=sizes.pop("seq_len"), global_batch=sizes.pop("global_batch"))
    model = DecoderConfig(
        **sizes,
        head_dim=draw(st.sampled_from([4, 6, 8])),
        mlp=draw(st.sampled_from(["gated", "plain"])),
        embeddings=draw(st.sampled_from(["untied", "tied"])),
        layers="scanned" if strategy.pipeline else draw(st.sampled_from(["scanned", "unrolled"])),
        dropout=draw(st.sampled_from([0.0, 0.5])),
        moe=moe if "expert" in strategy.mesh_axes or draw(st.booleans()) else None,
    )
    return Experiment(model=model, batch=batch, strategies={"it": strategy})


def divisors(strategy: Strategy) -> dict[str, int]:
    """What each size must be a multiple of."""
    rules, axes, pipeline = strategy.rules(), strategy.mesh_axes, strategy.pipeline

    def ways(*logical: str) -> int:
        found = [rules[name] for name in logical]
        found += [strategy.optimizer_rules()[name] for name in logical]
        return math.lcm(*(math.prod(axes[axis] for axis in each) for each in found))

    split = strategy.sequence_split
    exchanged = split.ways if split and split.method == "all_to_all" else 1
    chunks = 2 if split and split.order == "zigzag" else 1
    stages, repeats, parts = (
        (pipeline.stages, pipeline.repeats, pipeline.microbatches) if pipeline else (1, 1, 1)
    )
    return {
        "num_layers": stages * repeats,
        "embed_dim": ways("embed", "act_embed"),
        "num_heads": ways("heads", "act_heads") * exchanged,
        "num_kv_heads": ways("kv_heads", "act_kv_heads"),
        "mlp_dim": ways("mlp", "act_mlp"),
        "vocab_size": ways("vocab", "act_vocab"),
        "seq_len": ways("act_len", "act_res_len") * chunks * stages,
        "global_batch": ways("act_batch") * strategy.accumulate * parts,
        "num_experts": ways("expert", "act_expert"),
    }


def strategy_or_refusal(text: str) -> Strategy | None:
    """The product, or None where it is refused as a product, before there is a model."""
    try:
        return strategy_from_text(text)
    except ConfigError as error:
        check_refusal(error, set(re.findall(r"[a-z]\w*", text)))
        return None


def check_refusal(error: Exception, names: set[str]) -> None:
    """One line that names what is wrong, and says a size of it."""
    message = str(error)
    assert "\n" not in message
    assert names & set(re.findall(r"[A-Za-z]\w*", message)), message
    assert re.search(r"\d", message), message


DIMS = {*LOGICAL_AXES, *LARGEST, "sequences", "layers", "group_size", "context"}


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), tree)


@given(st.data())
@settings(max_examples=EXAMPLES["traced"], **COMMON)
def test_a_product_is_laid_out_or_refused_by_the_name_of_a_dim(data):
    """Up to two sizes are left to chance; nothing is compiled."""
    text = data.draw(products())
    if (strategy := strategy_or_refusal(text)) is None:
        return event("refused as a product")
    experiment = data.draw(experiments(strategy, broken=2))
    workload = Workload(model=experiment.model, batch=experiment.batch)
    try:
        experiment.check()
        layout = lay_out(workload, strategy, parse_target(f"cpu:{strategy.num_devices}"))
        step = jitted_step(workload, strategy, layout)
        state, batch = abstract_state(workload), abstract_batch(workload, strategy.num_devices)
        new_state, _ = jax.eval_shape(step, state, batch)
    except (ConfigError, ShardingError) as error:
        check_refusal(error, DIMS)
        return event("refused")
    event("laid out")
    assert shapes(new_state) == shapes(state)


@given(st.data())
@settings(max_examples=EXAMPLES["run"], **COMMON)
def test_a_product_whose_sizes_divide_computes_what_one_device_does(data):
    """One step: the loss, each gradient and the update, within the derived tolerance."""
    text = data.draw(products())
    if (strategy := strategy_or_refusal(text)) is None:
        return event("refused as a product")
    experiment = data.draw(experiments(strategy, broken=0))
    try:
        experiment.check()
        row = verify_strategy(experiment, "it", steps=1)
    except (ConfigError, ShardingError) as error:
        check_refusal(error, DIMS)
        return event("refused")
    event("run")
    assert row["status"] == "ok", row["findings"]
