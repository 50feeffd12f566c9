"""The ledger of whole steps: every collective, on its axis, with its bytes, by hand."""

import pytest

from spmdlab.cost.ledger import Ledger, price
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.hlo.parse import parse
from spmdlab.timeline.replay import replay
from tests.hlo_samples.model import BATCH, EMBED, LAYERS, LAYOUTS, LEN, MLP, SLICED
from tests.hlo_samples.programs import HEAD, PLATFORMS, SAMPLES, sample, stack

TARGETS = {"cpu": "cpu:8", "v5e": "v5e:2x4"}
# What a bfloat16 is on the wire: XLA's CPU backend reduces and gathers in float32.
ELEMENT = {"cpu": 4, "v5e": 2}


def ledger_of(text: str, axes: dict[str, int], platform: str) -> Ledger:
    topology = parse_topology(TARGETS[platform])
    return price(parse(text), chip(topology.chip), row_major_placement(topology, axes))


def texts(layout: str):
    """What this JAX compiles now, and the stored dumps of both lines."""
    for platform in PLATFORMS:
        yield pytest.param(layout, platform, None, id=f"{layout}-{platform}-now")
        for name in SAMPLES:
            if f"_{platform}_{layout}_scanned" in name:
                yield pytest.param(layout, platform, name, id=f"{layout}-{name[:7]}-{platform}")


steps = pytest.mark.parametrize(
    ("layout", "platform", "name"), [case for layout in LAYOUTS for case in texts(layout)]
)


def text_of(layout: str, platform: str, name: str | None) -> str:
    return sample(name) if name else stack(layout, platform, scanned=True).text


LOSS = 4.0  # bytes of the one float32 that is averaged over the batch


def expected(layout: str, element: int) -> dict[tuple[str, str], float]:
    """(purpose, axis) -> bytes of the arrays concerned in one step, on one device.

    Weights up_LDF and down_LFD are gathered over fsdp when they are used, in the forward pass
    and again in the backward pass.  Their gradients are summed over whatever splits the batch.
    Activations are summed over tensor where a matmul contracts a split dim: in the forward
    pass after down, in the backward pass before up.
    """
    axes = LAYOUTS[layout][0]
    tensor, batch_ways = axes.get("tensor", 1), axes.get("data", 1) * axes.get("fsdp", 1)
    weights = 2 * LAYERS * EMBED * MLP * element / tensor
    batch_axis = "data" if "data" in axes else "fsdp"
    found = {}
    if "fsdp" in axes:
        found["gather", "fsdp"] = 2 * weights
    if batch_ways > 1:
        found["sum", batch_axis] = weights + LOSS
    if tensor > 1:
        activation = BATCH // batch_ways * LEN * EMBED * element
        found["sum", "tensor"] = 2 * LAYERS * activation
    return found


@steps
def test_every_collective_is_on_its_axis_with_its_bytes(layout, platform, name):
    ledger = ledger_of(text_of(layout, platform, name), LAYOUTS[layout][0], platform)
    purpose = {"all-gather": "gather", "all-reduce": "sum", "reduce-scatter": "sum"}
    found: dict[tuple[str, str], float] = {}
    for row in ledger.collectives:
        key = purpose[row.kind], row.wire.axis_key
        found[key] = found.get(key, 0.0) + row.wire.payload_bytes * row.count
        assert row.wire.whole_axes
        assert row.counted
        assert row.count in (1.0, LAYERS)
    assert found == expected(layout, ELEMENT[platform])
    assert not ledger.unmodelled


@steps
def test_bytes_sent_follow_from_the_algorithm(layout, platform, name):
    """(n - 1) / n of an array for a gather or scatter, twice that for an all-reduce."""
    axes = LAYOUTS[layout][0]
    ledger = ledger_of(text_of(layout, platform, name), axes, platform)
    sent = dict.fromkeys({row.wire.axis_key for row in ledger.collectives}, 0.0)
    for row in ledger.collectives:
        n = axes[row.wire.axis_key]
        passes = 2 if row.kind == "all-reduce" else 1
        one = passes * row.wire.payload_bytes * (n - 1) / n
        assert row.wire.wire_bytes == pytest.approx(one)
        sent[row.wire.axis_key] += one * row.count
    assert ledger.wire_bytes() == pytest.approx(sent)


def test_a_tpu_gradient_under_fsdp_is_scattered_and_a_cpu_one_is_not():
    kinds = {
        platform: {
            row.kind
            for row in ledger_of(
                stack("fsdp", platform, scanned=True).text, {"fsdp": 8}, platform
            ).collectives
            if row.kind != "all-gather" and row.wire.payload_bytes > LOSS
        }
        for platform in PLATFORMS
    }
    assert kinds == {"cpu": {"all-reduce"}, "v5e": {"reduce-scatter"}}


@steps
def test_totals_are_the_sum_of_the_rows(layout, platform, name):
    ledger = ledger_of(text_of(layout, platform, name), LAYOUTS[layout][0], platform)
    assert ledger.flops().total == pytest.approx(
        sum((row.flops.matmul + row.flops.vector) * row.count for row in ledger.rows)
    )
    line = replay(ledger)
    total = sum(row.seconds * row.count for row in ledger.rows)
    assert line.step_s.no_overlap == pytest.approx(total)
    assert line.compute_s + line.collective_s + line.copy_s == pytest.approx(total)
    assert line.step_s.ideal <= line.step_s.replay <= line.step_s.no_overlap
    # Everything that is started is waited for, so the step is what each row takes of it.
    assert sum(line.exposed_s) == pytest.approx(line.step_s.replay)


def test_between_slices_only_the_scattered_gradients_travel():
    """Two slices of eight: fsdp inside each, data between them.

    Inside a slice each weight is gathered twice and its gradient scattered; over DCN goes the
    eighth that a device keeps, as an all-reduce that TPU prints as a send and a recv.
    """
    text = sample("jax0.12_2xv5e_sliced_scanned")
    placement = row_major_placement(parse_topology("2*v5e:2x4"), SLICED[0])
    ledger = price(parse(text), chip("v5e"), placement)
    weights = 2 * LAYERS * EMBED * MLP * 2  # bfloat16
    found: dict[tuple[str, str, str], float] = {}
    for row in ledger.collectives:
        if row.wire.payload_bytes > 4 * 128:  # the loss, in every lane of a vector register
            key = row.kind, row.wire.axis_key, row.wire.link
            found[key] = found.get(key, 0.0) + row.wire.payload_bytes * row.count
            assert row.parameter is not None
    assert found == {
        ("all-gather", "fsdp", "ici"): 2 * weights,
        ("reduce-scatter", "fsdp", "ici"): weights,
        ("all-reduce", "data", "dcn"): weights / 8,
    }
    assert not ledger.unmodelled
    line = replay(ledger)
    assert sum(line.exposed_s) == pytest.approx(line.step_s.replay)


def program(*lines: str, before: str = "") -> str:
    body = "\n".join(f"  {line}" for line in lines)
    return f"""{HEAD}{before}
ENTRY %main (p: f32[64,64]) -> f32[64,64] {{
  %p = f32[64,64]{{1,0}} parameter(0)
{body}
}}
"""


ADD = """%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  %y = f32[] parameter(1)
  ROOT %s = f32[] add(%x, %y)
}
"""


def test_a_collective_inside_a_call_is_found():
    inner = f"""{ADD}
%inner (q: f32[64,64]) -> f32[64,64] {{
  %q = f32[64,64]{{1,0}} parameter(0)
  ROOT %r = f32[64,64]{{1,0}} all-reduce(%q), replica_groups={{}}, to_apply=%add
}}
"""
    text = program(
        "%a = f32[64,64]{1,0} call(%p), to_apply=%inner",
        "ROOT %b = f32[64,64]{1,0} call(%a), to_apply=%inner",
        before=inner,
    )
    rows = ledger_of(text, {"data": 2, "tensor": 4}, "v5e").collectives
    assert [row.name for row in rows] == ["r", "r"]
    assert rows[0].wire.mesh_axes == ("data", "tensor")
    assert rows[0].wire.axis_key == "data+tensor"


def test_of_two_branches_the_dearer_is_counted_and_that_is_said():
    branches = """%cheap (q: f32[64,64]) -> f32[64,64] {
  ROOT %q = f32[64,64]{1,0} parameter(0)
}

%dear (q: f32[64,64]) -> f32[64,64] {
  %q = f32[64,64]{1,0} parameter(0)
  ROOT %d = f32[64,64]{1,0} dot(%q, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""
    text = program(
        "%i = s32[] constant(0)",
        "ROOT %c = f32[64,64]{1,0} conditional(%i, %p, %p), branch_computations={%cheap, %dear}",
        before=branches,
    )
    ledger = ledger_of(text, {"data": 8}, "v5e")
    assert ledger.flops().matmul == 2 * 64**3
    assert any("conditional c" in note for note in ledger.unmodelled)


def test_groups_of_a_part_of_an_axis_are_reported():
    text = program(
        "ROOT %r = f32[64,64]{1,0} all-reduce(%p), replica_groups={{0,1},{2,3},{4,5},{6,7}}, "
        "to_apply=%add",
        before=ADD,
    )
    ledger = ledger_of(text, {"data": 8}, "v5e")
    assert not ledger.collectives[0].wire.whole_axes
    assert any("part of the devices along data" in note for note in ledger.unmodelled)


def test_what_cannot_be_priced_is_listed():
    text = program(
        '%k = f32[64,64]{1,0} custom-call(%p), custom_call_target="secret"',
        "%t = token[] after-all()",
        "%s = (f32[64,64]{1,0}, u32[], token[]) send(%k, %t), channel_id=1",
        "%d = token[] send-done(%s), channel_id=1",
        "ROOT %c = f32[64,64]{1,0} copy(%k)",
    ).replace("is_scheduled=true, ", "")
    notes = " | ".join(ledger_of(text, {"data": 8}, "v5e").unmodelled)
    for expected_note in ("'secret'", "no source and target", "not scheduled"):
        assert expected_note in notes


def test_phases_of_a_training_step():
    ledger = ledger_of(stack("fsdp", "cpu", scanned=True).text, {"fsdp": 8}, "cpu")
    products = [row for row in ledger.rows if row.flops.matmul]
    counts = {
        phase: sum(row.count for row in products if row.phase == phase)
        for phase in {row.phase for row in products}
    }
    assert counts == {"forward": 2 * LAYERS, "backward": 5 * LAYERS}
    assert "update" in {row.phase for row in ledger.rows}
