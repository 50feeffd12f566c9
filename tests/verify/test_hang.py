"""What a stuck process's log and last words are read as."""

from spmdlab.verify import hang

LOG = [
    "E1201 17:27:06.449066   10508 rendezvous.cc:116] [id=1] This thread has been waiting for "
    "`all gather RendezvousKey{run_id=RunId: -12, global_devices=[0, 1], num_local_participants=2, "
    "collective_op_kind=cross_module, op_id=7}` for 3 seconds and may be stuck. Expected 2 threads"
]
HLO = """HloModule m, is_scheduled=true, num_partitions=2

ENTRY %main (p: f32[4]) -> f32[8] {
  %p = f32[4]{0} parameter(0)
  %s = f32[4]{0} collective-permute(%p), channel_id=7, source_target_pairs={{0,1},{1,0}}
  ROOT %g = f32[8]{0} all-gather(%s), channel_id=7, replica_groups={{0,1}}, dimensions={0}, \
use_global_device_ids=true, metadata={op_name="jit(f)/head/kernel"}
}
"""


def test_the_collective_of_that_kind_and_channel(tmp_path):
    hang.note(tmp_path, "running step 1", hang.collectives_of(HLO, {"fsdp": 2}, ()))
    text = hang.explain(tmp_path, LOG)
    assert text.startswith(" while running step 1; devices wait for others in all-gather g over ")
    assert "fsdp" in text
    assert "jit(f)/head/kernel" in text
    assert "permute" not in text


def test_without_last_words_the_log_must_do(tmp_path):
    assert hang.explain(tmp_path, LOG) == ("; devices wait for others in all-gather with channel 7")


def test_no_complaint_is_said_to_be_none(tmp_path):
    hang.note(tmp_path, "compiling")
    assert hang.explain(tmp_path, ["nothing"]) == " while compiling; no collective has complained"


def test_a_program_that_cannot_be_read_is_no_error():
    assert hang.collectives_of("no HLO", {"data": 2}, ()) == []


def test_xla_warns_before_we_give_up_and_never_ends_the_process_itself():
    assert "warn_stuck_timeout_seconds=10" in hang.xla_flags(300)
    assert "warn_stuck_timeout_seconds=3" in hang.xla_flags(9)
    assert "terminate_timeout_seconds=900" in hang.xla_flags(300)
