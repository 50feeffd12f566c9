from spmdlab.report.collectives import LONGEST, ledger_report
from spmdlab.report.console import text_of

TOTALS = {
    "flops": 1.5e12,
    "hbm_bytes": 3 * 2**30,
    "wire_bytes": {"fsdp": 56 * 2**20, "data": 1024},
    "compute_s": 9e-3,
    "collective_s": 2e-3,
    "exposed_collective_s": 5e-4,
    "step_s": {"ideal": 9e-3, "replay": 9.5e-3, "no_overlap": 11e-3},
}


def collective(**changes):
    return {
        "kind": "all-gather",
        "mesh_axes": ["data", "fsdp"],
        "link": "ICI",
        "dtype": "bf16",
        "payload_bytes": 64 * 2**20,
        "wire_bytes": 56 * 2**20,
        "count": 32,
        "seconds": 1.2e-3,
        "exposed_seconds": 3e-4,
        "parameter": "params.layers.mlp.gate",
        "op_name": "jit(step)/mlp/dot",
        "source": "spmdlab/models/mlp.py:24",
        "phase": "forward",
        **changes,
    }


def report(**changes) -> str:
    ledger = {"totals": TOTALS, "collectives": [], "unmodelled": [], "memory": {}} | changes
    return text_of(*ledger_report(ledger))


def test_text(golden):
    unknown = dict.fromkeys(["parameter", "source", "phase", "dtype", "seconds", "exposed_seconds"])
    found = [collective(seconds=1e-4), collective(), collective(mesh_axes=[], **unknown)]
    golden("ledger_table.txt", report(collectives=found, unmodelled=["custom-call %x: no cost"]))


def test_the_longest_come_first_and_the_cut_is_told():
    found = [collective(parameter=f"p{n}.", seconds=n * 1e-3) for n in range(LONGEST + 5)]
    text = report(collectives=found)
    assert text.index("p44.") < text.index("p43.") < text.index("p5.")
    assert "p4." not in text
    assert f"the {LONGEST} longest of {LONGEST + 5}; ledger.json has them all" in text


def test_says_what_it_was_priced_for():
    lines = report(target="v5e:2x4", mesh={"fsdp": 4, "tensor": 2}).splitlines()
    assert lines[:2] == ["target               v5e:2x4", "mesh                 fsdp=4 tensor=2"]


def test_axes_have_one_name_in_totals_and_rows():
    text = report(totals=TOTALS | {"wire_bytes": {"data+fsdp": 1024}}, collectives=[collective()])
    assert text.count("data+fsdp") == 2


def test_a_long_path_keeps_its_end():
    text = report(collectives=[collective(source="/home/me/code/lab/models/mlp.py:24")])
    assert " lab/models/mlp.py:24 " in text
    assert "/home/me" not in text


def test_no_collectives_is_said():
    assert "no collectives: nothing is exchanged between devices" in report()


def test_markup_in_names_is_text():
    assert "params[0][/b]" in report(collectives=[collective(parameter="params[0][/b]")])


def test_a_collective_of_many_parameters_names_two():
    text = report(collectives=[collective(parameter="p.a, p.b, p.c, p.d")])
    assert "p.a, p.b and 2 more" in text
