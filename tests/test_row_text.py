"""What `analyze_hlo` says of texts written here by hand, and `compile_row` of its limits."""

import json

import pytest

from spmdlab.config import Experiment
from spmdlab.errors import ConfigError, HloError, ShardingError, TargetError
from spmdlab.models.config import DecoderConfig
from spmdlab.report.rows import NOMINAL, failed_row
from spmdlab.row import analyze_hlo, compile_row
from spmdlab.strategies import Data
from spmdlab.workload import BatchConfig

# One all-gather of f32[16, 128] over pairs of neighbours: 8 KiB gathered, half of it received.
LAYOUT = {"cpu": "{1,0}", "tpu": "{1,0:T(8,128)}"}
TEXT = """\
HloModule jit_f, is_scheduled=true, num_partitions=8

ENTRY %main (x: f32[8,128]) -> f32[16,128] {{
  %x = f32[8,128]{layout} parameter(0)
  ROOT %g = f32[16,128]{layout} all-gather(%x), channel_id=1, {groups}, dimensions={{0}}, \
use_global_device_ids=true
}}
"""


def text(kind: str = "tpu", groups: str = "replica_groups=[4,2]<=[8]") -> str:
    return TEXT.format(layout=LAYOUT[kind], groups=groups)


def notes(found) -> str:
    return "\n".join(found["unmodelled"])


def test_a_collective_is_filed_under_the_axis_of_the_mesh_that_was_given():
    found = analyze_hlo(text(), "v5e:2x4", "data=4 tensor=2")
    (gather,) = found["collectives"]
    assert (gather["kind"], gather["mesh_axes"], gather["link"]) == (
        "all-gather",
        ["tensor"],
        "ici",
    )
    assert (gather["payload_bytes"], gather["wire_bytes"]) == (16 * 128 * 4, 8 * 128 * 4)
    assert found["totals"]["wire_bytes"] == {"tensor": 8 * 128 * 4}
    assert (found["target"], found["mesh"]) == ("v5e:2x4", {"data": 4, "tensor": 2})


def test_the_mesh_a_text_names_is_taken_where_none_is_given():
    named = "replica_groups=mesh['a'=4,'b'=2] {'b'}"
    found = analyze_hlo(text(groups=named), "v5e:2x4", None)
    assert found["mesh"] == {"a": 4, "b": 2}
    assert found["collectives"][0]["mesh_axes"] == ["b"]
    assert "no mesh was given" not in notes(found)


def test_without_any_mesh_it_says_that_all_is_one_axis():
    found = analyze_hlo(text(), "v5e:2x4", None)
    assert found["mesh"] == {"devices": 8}
    assert "no mesh was given and the text names none: all is filed under 'devices'" in notes(found)


@pytest.mark.parametrize(
    ("kind", "target", "said"),
    [
        ("tpu", "v5e:2x4", None),
        ("cpu", "cpu:8", None),
        ("tpu", "cpu:8", "compiled for a TPU and is priced on a CPU"),
        ("tpu", "h100:1x8", "compiled for a TPU and is priced on a GPU"),
        ("cpu", "v5e:2x4", "no TPU layouts"),
    ],
)
def test_a_program_of_another_compiler_is_told(kind, target, said):
    found = notes(analyze_hlo(text(kind), target, "data=8"))
    if said:
        assert said in found
    else:
        assert "compiled for" not in found
        assert "layouts" not in found


def test_the_nominal_device_is_named_once():
    found = analyze_hlo(text("cpu"), "cpu:8", "data=8")
    assert [each for each in found["unmodelled"] if "nominal" in each] == [f"cpu:8: {NOMINAL}"]
    assert found["evidence"] == "emulated"


def test_is_strict_json_with_null_for_what_a_text_does_not_say():
    found = analyze_hlo(text(), "v5e:2x4", "data=8")
    assert json.loads(json.dumps(found, allow_nan=False)) == found
    assert (found["memory"]["temp"], found["memory"]["peak"]) == (None, None)
    assert "neither temporaries nor peak" in notes(found)


@pytest.mark.parametrize(
    ("target", "mesh", "kind", "message"),
    [
        ("local", None, TargetError, "by name, as in cpu:8 or v5e:2x4, not 'local'"),
        ("v5e:4x4", None, TargetError, "for 8 devices, target 'v5e:4x4' has 16"),
        ("v5e:2x4", "data=4", ShardingError, "has 4 positions; v5e:2x4 has 8 devices"),
        ("v5e:2x4", "", ConfigError, "names no axis"),
    ],
)
def test_refuses_in_one_line(target, mesh, kind, message):
    with pytest.raises(kind, match=message) as raised:
        analyze_hlo(text(), target, mesh)
    assert "\n" not in str(raised.value)


def test_every_cut_of_a_text_is_refused():
    whole = text()
    end = whole.rindex("}")
    for length in range(end):
        with pytest.raises(HloError) as raised:
            analyze_hlo(whole[:length], "v5e:2x4", None)
        assert "\n" not in str(raised.value)


@pytest.fixture(scope="module")
def row():
    """One small step, on a device of 1 MB and on one that is large enough."""
    model = DecoderConfig(
        vocab_size=256,
        num_layers=1,
        embed_dim=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mlp_dim=64,
    )

    def of(capacity: float):
        experiment = Experiment(
            model=model,
            batch=BatchConfig(global_batch=8, seq_len=16),
            strategies={"data": Data(8)},
            chips={"cpu": {"hbm_bytes": capacity}},
        )
        return compile_row(experiment, "data", "cpu:8", detail=True)

    return of


def test_a_step_larger_than_its_device_says_by_how_much_and_keeps_its_numbers(row):
    found = row(1e5)
    assert (found["status"], found["error_type"]) == ("does not fit", "DoesNotFit")
    memory = found["memory"]
    assert memory["peak"] > memory["capacity"] == 1e5
    assert "more than the 97.7 KiB it has: " in found["error"]
    # Two moments are twice the weights; the names stand in the order of their sizes.
    assert found["error"].index("optimizer") < found["error"].index("params")
    assert found["step_s"]["replay"] > 0
    assert found["ledger"]["totals"]["flops"] == found["flops"] > 0


def test_a_failed_row_has_the_keys_of_a_good_one(row):
    good = row(1e9)
    assert (good["status"], good["error"]) == ("ok", None)
    bad = failed_row(strategy="data", target="cpu:8", error="no", error_type="CompileError")
    assert bad.keys() - good.keys() == {"log_tail"}
    assert good.keys() - bad.keys() == {"ledger", "timeline_events"}
    assert bad["memory"].keys() == good["memory"].keys()
    assert bad["step_s"].keys() == good["step_s"].keys()
