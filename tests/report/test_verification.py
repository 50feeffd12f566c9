"""The table says what was compared; the notes say what is wrong."""

from spmdlab.report.console import text_of
from spmdlab.report.verification import verification_notes, verification_report


def worst(error, path="w"):
    return {"path": path, "error": error, "tolerance": 1e-5, "count": 1}


def row(**changes):
    steps = [
        {"step": 0, "worst": {"initial value": worst(0.0)}},
        {"step": 1, "worst": {k: worst(1e-7) for k in ("loss", "gradient", "update")}},
        {"step": 2, "worst": {"loss": worst(0.0), "gradient": worst(3e-7, "head"),
                              "update": worst(2e-7)}},
    ]  # fmt: skip
    base = {"strategy": "fsdp", "mesh": {"fsdp": 8}, "status": "ok", "error": None, "steps": steps,
            "tolerance": 6.2e-5, "findings": [], "notes": [], "seconds": 3.0}  # fmt: skip
    return {**base, **changes}


def finding(path, cause="reduced twice"):
    return {"step": 1, "cause": cause, "text": f"gradient of {path}: exactly 2 times"}


def test_the_worst_of_all_steps_with_its_parameter():
    text = text_of(*verification_report([row()]))
    line = next(line for line in text.splitlines() if line.startswith(" fsdp "))
    assert line.split() == [
        "fsdp", "fsdp=8", "ok", "2", "1.0e-07", "3.0e-07", "head", "2.0e-07", "6.2e-05", "3.00", "s"
    ]  # fmt: skip


def test_findings_are_grouped_by_cause_and_not_all_named():
    many = [finding(f"layer{n}") for n in range(8)]
    notes = verification_notes([row(status="mismatch", findings=many)])
    assert notes[0] == "fsdp, step 1: REDUCED TWICE: gradient of layer0: exactly 2 times"
    assert notes[5] == "fsdp, step 1: REDUCED TWICE: and 3 more, see verification.json"


def test_an_error_and_a_note_are_said():
    broken = row(status="error", error="no end after 60 s", steps=[])
    del broken["tolerance"], broken["seconds"]
    text = text_of(*verification_report([broken, row(notes=["zero gradients prove nothing"])]))
    assert "fsdp: no end after 60 s" in text
    assert "fsdp: zero gradients prove nothing" in text
