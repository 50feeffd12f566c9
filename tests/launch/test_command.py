"""Exit codes and what stands on stderr, in real processes."""

import pathlib
import signal
import subprocess
import sys
import textwrap
import time

import pytest

REPO = pathlib.Path(__file__).parents[2]

CONFIG = """
    from spmdlab.config import Experiment
    from spmdlab.models.config import DecoderConfig
    from spmdlab.strategies import Data, Fsdp
    from spmdlab.workload import BatchConfig

    def get_config(targets="cpu:8"):
        return Experiment(
            model=DecoderConfig(vocab_size=256, num_layers=1, embed_dim=32, num_heads=4,
                                num_kv_heads=2, head_dim=8, mlp_dim=64),
            batch=BatchConfig(global_batch=8, seq_len=16),
            strategies={"data": Data(8), "fsdp": Fsdp(8)},
            targets=tuple(targets.split("+")),
        )
"""

# Runs a launch script with a row function that compiles nothing: it shows what it was given.
DRIVER = """
    import os, pathlib, runpy, sys, time
    from spmdlab import errors
    from spmdlab.lab import workers
    from spmdlab.report.rows import failed_row

    def prepare(targets):
        pass

    def verify(experiment, strategy, *, dtype, steps, **options):
        if strategy == "tensor=8":
            raise errors.ShardingError("dim 'heads' does not divide")
        bad = strategy == "data=4"
        worst = {"path": "head.kernel", "error": 3.0 if bad else 1e-7, "tolerance": 1e-5}
        finding = {"step": steps, "cause": "reduced twice", "text": f"gradient of x: {dtype}"}
        return {"strategy": strategy, "target": "cpu:4", "mesh": {"data": 4}, "steps": [
                    {"step": steps, "worst": {"gradient": worst}}],
                "status": "mismatch" if bad else "ok", "error": None, "error_type": None,
                "tolerance": 1e-5, "findings": [finding] * bad, "notes": [], "seconds": 1.0}

    def row(experiment, strategy, target):
        if strategy == "tensor=8":
            raise errors.ShardingError("dim 'heads' does not divide")
        if strategy == "data=4":
            os.abort()
        if strategy == "data=1":
            pathlib.Path(__file__).with_name("worker").write_text(str(os.getpid()))
            time.sleep(60)
        found = failed_row(strategy=strategy, target=target, error="", error_type="")
        said = f"seq={experiment.batch.seq_len} mlp={experiment.model.mlp} "
        said += f"batch={experiment.batch.global_batch}/{experiment.batch.per_device_batch} "
        said += f"data={experiment.data.source},{experiment.data_seed} "
        said += f"chips={experiment.chips}"
        step_s = {"ideal": 1.0, "replay": 2.0, "no_overlap": 3.0}
        return found | {"status": "ok", "error": None, "evidence": said, "step_s": step_s}

    if __name__ == "__main__":
        workers.COMPILE_ROW, workers.PREPARE = "driver:row", "driver:prepare"
        from spmdlab.verify import supervise
        supervise.VERIFY_STRATEGY = "driver:verify"
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.py").write_text(textwrap.dedent(CONFIG))
    (tmp_path / "driver.py").write_text(textwrap.dedent(DRIVER))
    return tmp_path


def run(*command: str, path: str | pathlib.Path = REPO, variables: dict[str, str] | None = None):
    return subprocess.run(
        [sys.executable, *command],
        cwd=REPO,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(path), **(variables or {})},
        capture_output=True,
        text=True,
        timeout=120,
    )


def refused(done, *words: str) -> None:
    """Asserts exit code 2, nothing on stdout, and one line on stderr that has the words."""
    assert done.returncode == 2, done.stderr
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 1, done.stderr
    assert done.stderr.startswith("error: ")
    for word in words:
        assert word in done.stderr


@pytest.mark.parametrize("start", [["launch/compare.py"], ["-m", "launch.compare"]])
def test_runs_as_a_script_and_as_a_module(folder, start):
    refused(run(*start, f"--config={folder}/config.py", "--strategy=dta"), "Did you mean 'data'?")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        pytest.param([], ["--config=FILE.py is missing"], id="no-config"),
        pytest.param(["--config=none.py"], ["'none.py' does not exist"], id="no-file"),
        pytest.param(["--config.batch.seq_len=3"], ["--config=FILE.py is"], id="override-alone"),
        pytest.param(["--config=HERE", "--cofnig=x"], ["cofnig"], id="unknown-flag"),
        pytest.param(["--config=HERE", "x"], ["unexpected argument 'x'"], id="argument"),
        pytest.param(["--config=HERE", "--config.bach=3"], ["Did you mean 'batch'?"], id="field"),
        pytest.param(
            ["--config=HERE", "--config.batch.seq_length=3"], ["'seq_len'?"], id="inner-field"
        ),
        pytest.param(["--config=HERE", "--config.batch.seq_len=x"], ["seq_len=x"], id="no-number"),
        pytest.param(
            ["--config=HERE", "--config.batch.seq_len=none"], ["must be int"], id="none-for-int"
        ),
        pytest.param(["--config=HERE", "--config.model.mlp=gatd"], ["gated|plain"], id="choice"),
        pytest.param(["--config=HERE", "--config.strategies.data.ways=4"], ["ways"], id="frozen"),
        pytest.param(
            ["--config=HERE", "--config.strategies={'a':'fsdp=8'}"],
            ["--strategy='fsdp=8,"],
            id="strategies",
        ),
        pytest.param(["--config=HERE", "--config.model.num_heads=3"], ["num_kv_heads"], id="value"),
        pytest.param(["--config=HERE", "--config.chips={'v5e':{'x':1}}"], ["'x'"], id="chip-field"),
        pytest.param(["--config=HERE:v5e:3x3"], ["v5e:3x3", "v5e:2x4"], id="impossible-slice"),
        pytest.param(["--config=HERE", "--target=v99:2x2"], ["v99", "v5e"], id="unknown-chip"),
        pytest.param(["--config=HERE", "--target=cpu:8,"], ["empty part"], id="empty-part"),
        pytest.param(["--config=HERE", "--jobs=many"], ["many"], id="jobs"),
        pytest.param(["--config=HERE", "--out=/proc/none"], ["cannot write"], id="out"),
        pytest.param(["--config=HERE", "--out="], ["has no name"], id="out-without-a-name"),
        pytest.param(["--config=HERE", "--out=FILE"], ["is not a folder"], id="out-is-a-file"),
    ],
)
def test_a_mistake_is_one_line_and_exit_2(folder, flags, words):
    before = sorted(folder.rglob("*"))
    here = {"HERE": f"{folder}/config.py", "FILE": f"{folder}/driver.py"}
    for name, value in here.items():
        flags = [flag.replace(name, value) for flag in flags]
    refused(run("launch/compare.py", "--out=" + str(folder / "out"), *flags), *words)
    assert sorted(folder.rglob("*")) == before


@pytest.mark.parametrize(
    ("text", "words"),
    [
        pytest.param("def get_config(:\n", ["config.py:1: SyntaxError"], id="syntax"),
        pytest.param("x = 1\n", ["no function get_config"], id="no-get_config"),
        pytest.param("def get_config():\n    raise OSError('no')\n", ["config.py:2"], id="raises"),
        pytest.param("import sys\nsys.exit(0)\n", ["config.py:2: SystemExit: 0"], id="exits"),
        pytest.param("def get_config():\n    return 3\n", ["returned int"], id="returns-int"),
    ],
)
@pytest.mark.parametrize("script", ["compare", "explain", "verify"])
def test_a_bad_config_file_is_one_line_and_exit_2(folder, script, text, words):
    (folder / "config.py").write_text(text)
    refused(run(f"launch/{script}.py", f"--config={folder}/config.py"), *words)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ([], ["--hlo is missing"]),
        (["--hlo=none.txt", "--target=v5e:2x4"], ["'none.txt' does not exist"]),
        (["--hlo=none.txt"], ["--target is missing"]),
        (["--hlo=/bin/sh", "--target=v5e:2x4"], ["is binary"]),
        (["--config=x.py"], ["config"]),
    ],
)
def test_analyze_refuses_in_one_line(flags, words):
    refused(run("launch/analyze.py", *flags), *words)


def command(folder, *flags, script="compare") -> list[str]:
    return [
        sys.executable,
        "-P",
        str(folder / "driver.py"),
        f"{REPO}/launch/{script}.py",
        f"--config={folder}/config.py",
        f"--out={folder}/out",
        *flags,
    ]


def drive(folder, *flags, script="compare", variables=None):
    arguments = command(folder, *flags, script=script)[1:]
    return run(*arguments, path=f"{REPO}:{folder}", variables=variables)


HEED_SIGNALS = """
import os, signal, sys
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, signal.SIG_DFL)  # whoever runs the tests may ignore some (nohup, &)
os.execv(sys.argv[1], sys.argv[1:])
"""


def start(folder, *flags) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", HEED_SIGNALS, *command(folder, *flags)],
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": f"{REPO}:{folder}"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_overrides_reach_the_rows(folder):
    done = drive(
        folder,
        "--config.batch.seq_len=64",
        "--config.model.mlp=plain",
        "--config.batch.global_batch=none",
        "--config.batch.per_device_batch=0.5",
        "--config.data.source=x.npy",
        "--config.data.seed=3",
        "--config.chips={'v5e':{'hbm_bytes':1e9}}",
    )
    assert done.returncode == 0, done.stderr
    said = "seq=64 mlp=plain batch=None/0.5 data=x.npy,3 chips={'v5e': {'hbm_bytes': 1000000000.0}}"
    assert said in done.stdout


def test_a_table_on_stdout_progress_on_stderr_files_in_out(folder):
    done = drive(folder, "--target=cpu:8,v5e:2x4", "--strategy=data,data=4,tensor=8")
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stdout.splitlines() if line.startswith(" data  ")]
    assert "tensor=8 on v5e:2x4: dim 'heads' does not divide" in done.stdout
    assert "data=4 on cpu:8: the compiling process died of SIGABRT" in done.stdout
    assert len(done.stderr.splitlines()) == 6
    assert "\x1b" not in done.stdout + done.stderr
    assert sorted(p.name for p in (folder / "out").iterdir()) == ["comparison.json", "report.html"]


def test_what_a_config_prints_is_not_on_stdout(folder):
    with (folder / "config.py").open("a") as file:
        file.write("\nprint('from the config')\n")
    done = drive(folder, "--strategy=data")
    assert done.returncode == 0
    assert "from the config" not in done.stdout
    assert done.stderr.startswith("from the config\n")


def test_a_terminal_without_our_letters_gets_others(folder):
    done = drive(folder, "--strategy=data", variables={"PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0, done.stderr
    assert "???????" in done.stdout


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_the_workers_and_writes_nothing(folder, number):
    with start(folder, "--strategy=data=1") as running:
        worker = folder / "worker"
        until = time.monotonic() + 60
        while not (worker.exists() and worker.read_text()) and time.monotonic() < until:
            time.sleep(0.05)
        running.send_signal(number)
        _, said = running.communicate(timeout=20)
    assert running.returncode == 128 + number
    assert said == ("interrupted\n" if number == signal.SIGINT else "")
    assert not pathlib.Path(f"/proc/{worker.read_text()}").exists()
    assert not (folder / "out").exists()


def test_nohup_is_respected(folder):
    """With SIGHUP ignored by whoever starts it, a command survives the end of its terminal."""
    code = "import os, signal, sys; signal.signal(1, signal.SIG_IGN); os.execv(sys.argv[1], "
    code += "sys.argv[1:])"
    hangup = "import os; os.kill(os.getpid(), 1)\n"
    with (folder / "config.py").open("a") as file:
        file.write(hangup)
    done = run("-c", code, *command(folder, "--strategy=data"), path=f"{REPO}:{folder}")
    assert done.returncode == 0, done.stderr


def test_exit_2_where_every_row_is_a_mistake(folder):
    refused(drive(folder, "--strategy=tensor=8"), "tensor=8 on cpu:8: dim 'heads' does not divide")
    assert not (folder / "out").exists()


def test_exit_1_where_no_row_could_be_had(folder):
    assert drive(folder, "--strategy=data=4").returncode == 1


def test_verify_exits_1_on_a_mismatch_and_names_its_cause(folder):
    done = drive(folder, "--strategy=data,data=4,tensor=8", "--steps=2", script="verify")
    assert done.returncode == 1, done.stderr
    assert "data=4, step 2: REDUCED TWICE: gradient of x: float32" in done.stdout
    assert "tensor=8: dim 'heads' does not divide" in done.stdout
    assert len(done.stderr.splitlines()) == 3
    assert [path.name for path in (folder / "out").iterdir()] == ["verification.json"]


def test_verify_exits_0_where_all_agree(folder):
    done = drive(folder, "--strategy=data", script="verify")
    assert done.returncode == 0, done.stderr
    assert [
        line for line in done.stdout.splitlines() if line.split()[:3] == ["data", "data=4", "ok"]
    ]
    assert "head.kernel" in done.stdout


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--dtype=bfloat16"], "Unknown dtype 'bfloat16'"),
        (["--steps=0"], "steps must be at least 1"),
        (["--strategy=tensor=8"], "tensor=8 on cpu:8: dim 'heads' does not divide"),
    ],
)
def test_verify_refuses_in_one_line(folder, flags, words):
    refused(drive(folder, *flags, script="verify"), words)
    assert not (folder / "out").exists()


@pytest.mark.parametrize("script", ["compare", "explain", "analyze", "verify", "train"])
def test_help_says_what_it_does_and_lists_the_flags(script):
    done = run(f"launch/{script}.py", "--help")
    assert done.returncode == 0
    assert f"python -m launch.{script} " in done.stdout
    assert "  --out: folder for " in done.stdout
    assert done.stderr == ""
