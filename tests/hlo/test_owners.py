"""Owners, sources and phases of the collectives of real programs."""

import pathlib

import pytest

from spmdlab.cost.ledger import Row, price
from spmdlab.hardware.chips import chip
from spmdlab.hardware.topology import parse_topology, row_major_placement
from spmdlab.hlo.owners import Owners, argument_path, parameter_name
from spmdlab.hlo.parse import parse
from tests.hlo_samples import model
from tests.hlo_samples.programs import HEAD, PLATFORMS, SAMPLES, sample, stack

MODEL = pathlib.Path(model.__file__).read_text().splitlines()


def line_of(text: str) -> int:
    """The one line of model.py that ends in this."""
    (number,) = (n for n, line in enumerate(MODEL, 1) if line.endswith(text))
    return number


UP, DOWN = line_of("# the line of up"), line_of("# the line of down")
LINE = {"params.up": UP, "params.down": DOWN}


def rows_of(text: str, layout: str, target: str) -> list[Row]:
    topology = parse_topology(target)
    placement = row_major_placement(topology, model.LAYOUTS[layout][0])
    return list(price(parse(text), chip(topology.chip), placement).collectives)


def check_weights(rows: list[Row]) -> None:
    """Gathers and reductions of weights name them, and the line where each is multiplied."""
    gathers = [row for row in rows if row.kind == "all-gather"]
    assert {row.parameter for row in gathers} == set(LINE)
    for row in gathers:
        assert row.source.endswith(f"model.py:{LINE[row.parameter]}")
    assert {row.phase for row in gathers} == {"forward", "backward"}
    weight = model.EMBED * model.MLP
    gradients = [
        row
        for row in rows
        if row.kind in ("all-reduce", "reduce-scatter") and row.parameter is not None
    ]
    named = {name for row in gradients for name in row.parameter.split(", ")}
    assert named == set(LINE)
    for row in gradients:
        assert row.phase == "backward"
        assert row.source.endswith((f"model.py:{UP}", f"model.py:{DOWN}"))
        assert row.wire.payload_bytes >= weight * row.parameter.count(",")


def check_activations(rows: list[Row], count: int) -> None:
    """Sums over tensor belong to no parameter, and come from a line of the layer."""
    sums = [row for row in rows if row.wire.mesh_axes == ("tensor",)]
    assert sum(row.count for row in sums) == count
    for row in sums:
        assert row.parameter is None
        assert row.kind == "all-reduce"
        expected = {"forward": DOWN, "backward": UP}[row.phase]
        assert row.source.endswith(f"model.py:{expected}")


@pytest.mark.parametrize("name", [name for name in SAMPLES if "fsdp_tensor" in name])
def test_stored_dumps_of_both_jax_lines(name):
    rows = rows_of(sample(name), "fsdp_tensor", "cpu:8" if "cpu" in name else "v5e:2x4")
    check_weights(rows)
    check_activations(rows, 2 * model.LAYERS)
    assert all(row.source.startswith("/home/user/model.py:") for row in rows)


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("scanned", [True, False], ids=["scanned", "unrolled"])
def test_weights_under_fsdp(scanned, platform):
    text = stack("fsdp", platform, scanned=scanned).text
    check_weights(rows_of(text, "fsdp", {"cpu": "cpu:8", "v5e": "v5e:2x4"}[platform]))


@pytest.mark.parametrize("platform", PLATFORMS)
def test_activations_under_tensor(platform):
    text = stack("tensor", platform, scanned=True).text
    rows = rows_of(text, "tensor", {"cpu": "cpu:8", "v5e": "v5e:2x4"}[platform])
    check_activations(rows, 2 * model.LAYERS)
    assert {row.wire.mesh_axes for row in rows} == {("tensor",)}


@pytest.mark.parametrize("platform", PLATFORMS)
def test_gradients_under_data(platform):
    text = stack("data", platform, scanned=True).text
    rows = rows_of(text, "data", {"cpu": "cpu:8", "v5e": "v5e:2x4"}[platform])
    big = [row for row in rows if row.wire.payload_bytes > 4]
    assert {name for row in big for name in row.parameter.split(", ")} == set(LINE)
    loss = [row for row in rows if row.wire.payload_bytes == 4]
    assert [row.parameter for row in loss] == [None] * len(loss)


def donating(pairs: str) -> str:
    """A header in which outputs reuse the buffers of arguments."""
    return HEAD.replace("scheduled=true", f"scheduled=true, input_output_alias={{ {pairs} }}")


def owners_of(*lines: str, arguments: str = "w x") -> dict[str, tuple[str, ...]]:
    parameters = [
        f'  %{name} = f32[8,8]{{1,0}} parameter({n}), metadata={{op_name="{name}"}}'
        for n, name in enumerate(arguments.split())
    ]
    text = "\n".join(
        [
            donating("{}: (0, {})"),
            "ENTRY %main (w: f32[8,8], x: f32[8,8]) -> f32[8,8] {",
            *parameters,
            *(f"  {line}" for line in lines),
            "}",
            "",
        ]
    )
    program = parse(text)
    owners = Owners(program)
    return {i.name: owners.of(program.entry, i) for i in program.entry.instructions}


GROUPS = "replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}"


def test_a_chain_of_moves_keeps_its_owner_and_a_product_has_none():
    owners = owners_of(
        "%b = bf16[8,8]{1,0} convert(%w)",
        "%t = bf16[8,8]{0,1} transpose(%b), dimensions={1,0}",
        f"%g = bf16[64,8]{{1,0}} all-gather(%t), {GROUPS}",
        "%d = bf16[64,8]{1,0} dot(%g, %t), lhs_contracting_dims={1}, rhs_contracting_dims={1}",
        f"%a = bf16[512,8]{{1,0}} all-gather(%d), {GROUPS}",
        "ROOT %n = f32[8,8]{1,0} negate(%x)",
    )
    assert owners["g"] == ("w",)
    assert owners["a"] == ()


def test_a_sum_of_two_arguments_belongs_to_neither_on_the_way_in():
    owners = owners_of(
        "%s = f32[8,8]{1,0} multiply(%w, %x)",
        f"%g = f32[64,8]{{1,0}} all-gather(%s), {GROUPS}",
        "ROOT %n = f32[8,8]{1,0} negate(%x)",
    )
    assert owners["g"] == ()


def test_a_gradient_belongs_to_what_it_updates():
    owners = owners_of(
        "%d = f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={0}, rhs_contracting_dims={0}",
        "%r = f32[8,8]{1,0} all-reduce(%d), replica_groups={}",
        "%c = f32[] constant(0.1)",
        "%f = f32[8,8]{1,0} broadcast(%c), dimensions={}",
        "%m = f32[8,8]{1,0} multiply(%r, %f)",
        "ROOT %n = f32[8,8]{1,0} subtract(%w, %m)",
    )
    assert owners["r"] == ("w",)


TWO_UPDATES = f"""{donating("{0}: (0, {}), {1}: (1, {})")}\
ENTRY %main (w: f32[8,8], x: f32[8,8]) -> (f32[8,8], f32[8,8]) {{
  %w = f32[8,8]{{1,0}} parameter(0), metadata={{op_name="w"}}
  %x = f32[8,8]{{1,0}} parameter(1), metadata={{op_name="x"}}
  %d = f32[8,8]{{1,0}} dot(%w, %x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %r = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) all-reduce(%d, %d), replica_groups={{}}
  %a = f32[8,8]{{1,0}} get-tuple-element(%r), index=0
  %b = f32[8,8]{{1,0}} get-tuple-element(%r), index=0
  %n = f32[8,8]{{1,0}} subtract(%w, %a)
  %m = f32[8,8]{{1,0}} subtract(%x, %b)
  ROOT %t = (f32[8,8]{{1,0}}, f32[8,8]{{1,0}}) tuple(%n, %m)
}}
"""


def test_one_sum_may_serve_two_updates():
    program = parse(TWO_UPDATES)
    reduce = program.entry.by_name["r"]
    assert Owners(program).of(program.entry, reduce) == ("w", "x")


PIPELINED = f"""{donating("{}: (0, {})")}\
%condition (s: (f32[8,8], f32[8,8], f32[8,8])) -> pred[] {{
  %s = STATE parameter(0)
  ROOT %go = pred[] constant(false)
}}

%body (s: (f32[8,8], f32[8,8], f32[8,8])) -> (f32[8,8], f32[8,8], f32[8,8]) {{
  %s = STATE parameter(0)
  %last = f32[8,8]{{1,0}} get-tuple-element(%s), index=0
  %x = f32[8,8]{{1,0}} get-tuple-element(%s), index=2
  %d = f32[8,8]{{1,0}} dot(%x, %x), lhs_contracting_dims={{0}}, rhs_contracting_dims={{0}}
  %r = f32[8,8]{{1,0}} all-reduce(%d), replica_groups={{}}
  ROOT %t = STATE tuple(%r, %last, %x)
}}

ENTRY %main (w: f32[8,8], x: f32[8,8]) -> f32[8,8] {{
  %w = f32[8,8]{{1,0}} parameter(0), metadata={{op_name="w"}}
  %x = f32[8,8]{{1,0}} parameter(1), metadata={{op_name="x"}}
  %z = f32[] constant(0)
  %zero = f32[8,8]{{1,0}} broadcast(%z), dimensions={{}}
  %s = STATE tuple(%zero, %zero, %x)
  %l = STATE while(%s), condition=%condition, body=%body
  %g = f32[8,8]{{1,0}} get-tuple-element(%l), index=1
  ROOT %n = f32[8,8]{{1,0}} subtract(%w, %g)
}}
""".replace("STATE", "(f32[8,8]{1,0}, f32[8,8]{1,0}, f32[8,8]{1,0})")


def test_a_gradient_handed_on_from_turn_to_turn_keeps_its_owner():
    """A pipelined loop: what is summed in one turn is passed on in the next."""
    program = parse(PIPELINED)
    body = program.computations["body"]
    assert Owners(program).of(body, body.by_name["r"]) == ("w",)


@pytest.mark.parametrize(
    ("op_name", "path"),
    [
        ("state['params']['layers']['mlp']['gate']", "params.layers.mlp.gate"),
        ("state['params']['value'].value", "params.value"),
        ("batch['tokens']", "batch.tokens"),
        ("w[1]", "w.1"),
        ("x", "x"),
        ("", ""),
    ],
)
def test_paths(op_name, path):
    assert argument_path(op_name) == path


def test_a_parameter_comes_before_its_optimizer_state():
    assert parameter_name(("optimizer.mu.w", "params.w")) == "params.w"
    assert parameter_name(("optimizer.mu.w",)) == "optimizer.mu.w"
    assert parameter_name(()) is None
