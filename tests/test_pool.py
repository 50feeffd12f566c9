"""Workers die here in all the ways a compiler can make them die."""

import os
import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

from spmdlab import pool
from spmdlab.pool import Call, Done, Failed

JOBS = """
    import os, signal, time
    from spmdlab import errors

    READY = []

    def prepare(value):
        READY.append(value)

    def double(x):
        return {"twice": 2 * x, "pid": os.getpid(), "ready": list(READY)}

    def abort():
        os.write(2, b"F0101 partitioner.cc:12] Check failed: a == b (1 vs. 2)\\n")
        os.abort()

    def killed():
        os.kill(os.getpid(), signal.SIGKILL)

    def leave():
        os._exit(3)

    def noisy():
        print("to stdout")
        os.write(2, b"W0101 libtpu says something\\n")
        raise errors.ShardingError("does not\\ndivide")

    def bug():
        return {}["missing"]

    def too_big():
        raise errors.DoesNotFit("needs more", needed_bytes=20.0, capacity_bytes=16.0)

    def unpicklable():
        return (n for n in "abc")

    def slow():
        time.sleep(60)
"""


@pytest.fixture(autouse=True)
def jobs(tmp_path, monkeypatch):
    (tmp_path / "jobs_of_the_test.py").write_text(textwrap.dedent(JOBS))
    monkeypatch.syspath_prepend(tmp_path)


def call(name: str, *args) -> Call:
    return Call(function=f"jobs_of_the_test:{name}", args=args)


def outcomes(calls, **options):
    found = dict(pool.run(calls, **{"jobs": 1} | options))
    return [found[index] for index in range(len(calls))]


def test_a_worker_does_many_jobs_and_prepares_once():
    done = outcomes([call("double", n) for n in range(5)], setup=call("prepare", "tpu"))
    assert [each.value["twice"] for each in done] == [0, 2, 4, 6, 8]
    assert len({each.value["pid"] for each in done}) == 1
    assert {tuple(each.value["ready"]) for each in done} == {("tpu",)}
    assert done[0].value["pid"] != os.getpid()


def test_two_workers_share_the_jobs():
    done = outcomes([call("double", n) for n in range(20)], jobs=2)
    assert [each.value["twice"] for each in done] == [2 * n for n in range(20)]
    assert len({each.value["pid"] for each in done}) == 2


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("abort", "died of SIGABRT; it said: F0101 partitioner.cc:12] Check failed: a == b"),
        ("killed", "SIGKILL), most often because the machine ran out of memory"),
        ("leave", "exited with code 3"),
    ],
)
def test_a_death_loses_nothing_but_its_own_job(name, message):
    before, dead, after = outcomes([call("double", 1), call(name), call("double", 2)])
    assert (before.value["twice"], after.value["twice"]) == (2, 4)
    assert before.value["pid"] != after.value["pid"]
    assert isinstance(dead, Failed)
    assert dead.error_type == "WorkerDied"
    assert message in dead.message


def test_each_of_many_deaths_is_replaced():
    found = outcomes([call("abort"), call("killed")] * 3 + [call("double", 7)], jobs=2)
    assert [type(each) for each in found] == [Failed] * 6 + [Done]


def test_an_expected_error_is_one_line_with_the_log_beside_it():
    (failed,) = outcomes([call("noisy")])
    assert (failed.error_type, failed.message) == ("ShardingError", "does not divide")
    assert failed.expected
    assert failed.log_tail == ("to stdout", "W0101 libtpu says something")


def test_the_log_of_one_job_is_not_given_to_the_next():
    _, second = outcomes([call("noisy"), call("too_big")])
    assert second.log_tail == ()
    assert (second.needed_bytes, second.capacity_bytes) == (20.0, 16.0)


def test_a_bug_keeps_its_traceback():
    (failed,) = outcomes([call("bug")])
    assert not failed.expected
    assert any('return {}["missing"]' in line for line in failed.log_tail)


def test_a_result_that_cannot_travel_is_an_error_of_its_job():
    failed, done = outcomes([call("unpicklable"), call("double", 1)])
    assert "pickle" in failed.message
    assert done.value["twice"] == 2


def test_nothing_a_worker_writes_reaches_the_terminal(capfd):
    outcomes([call("noisy"), call("abort")])
    assert capfd.readouterr() == ("", "")


def test_setup_that_fails_is_the_error_of_each_job():
    first, second = outcomes([call("double", 1), call("double", 2)], setup=call("too_big"))
    assert first.error_type == second.error_type == "DoesNotFit"


def test_leaving_early_ends_the_workers():
    running = pool.run([call("double", 1), call("slow")], jobs=2)
    _, done = next(running)
    began = time.monotonic()
    running.close()
    assert time.monotonic() - began < 10
    assert not pathlib.Path(f"/proc/{done.value['pid']}").exists()


def test_a_call_that_takes_too_long_is_ended_and_the_others_go_on():
    calls = [call("slow"), call("double", 1), call("double", 2)]
    began = time.monotonic()
    outcomes = dict(pool.run(calls, jobs=2, timeout_s=3))
    assert time.monotonic() - began < 30
    assert outcomes[0].error_type == "TimedOut"
    assert not outcomes[0].expected
    assert "the process was killed" in outcomes[0].message
    assert [outcomes[i].value["twice"] for i in (1, 2)] == [2, 4]


def test_workers_end_soon_after_their_caller_was_killed(tmp_path):
    code = f"""
        import sys
        from spmdlab import pool
        sys.path.insert(0, {str(tmp_path)!r})
        def call(name, *args):
            return pool.Call(function="jobs_of_the_test:" + name, args=args)
        for _, done in pool.run([call("double", 1), call("slow")], jobs=1):
            print(done.value["pid"], flush=True)
    """
    caller = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        stdout=subprocess.PIPE,
        env={
            **os.environ,
            "PYTHONPATH": str(pathlib.Path(pool.__file__).parents[1]),
            "TMPDIR": str(tmp_path),
        },
        text=True,
    )
    with caller:
        assert caller.stdout is not None
        worker = pathlib.Path("/proc") / caller.stdout.readline().strip()
        assert worker.exists()
        caller.send_signal(signal.SIGKILL)
    until = time.monotonic() + 10
    while worker.exists() and time.monotonic() < until:
        time.sleep(0.1)
    assert not worker.exists()
