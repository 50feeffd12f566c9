"""Targets: read without jax, described by libtpu, refused in one line."""

import os
import pathlib
import subprocess
import sys
import types

import jax
import pytest

from spmdlab import targets
from spmdlab.errors import ConfigError, TargetError
from spmdlab.hardware.topology import parse_topology
from spmdlab.targets import devices, parse_target, prepare_environment, topology_of

ROOT = pathlib.Path(__file__).parents[1]

try:
    import libtpu  # noqa: F401
except ImportError:
    needs_libtpu = pytest.mark.skip(reason="libtpu is not installed: pip install 'spmdlab[tpu]'")
else:
    needs_libtpu = pytest.mark.skipif(False, reason="")


def python(code: str, **environment: str) -> subprocess.Popen:
    """Starts a fresh process, in which JAX has not started."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "TPU_", "ALLOW_"))}
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**kept, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def output(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=120)
    assert process.returncode == 0, err[-2000:]
    return out.strip()


@pytest.mark.parametrize(
    ("text", "platform", "emulated", "chip"),
    [
        ("cpu:8", "cpu", True, "cpu"),
        ("v5e:4x4", "tpu", False, "v5e"),
        ("2*tpu7x:4x4x4", "tpu", False, "tpu7x"),
        ("h100:2x8", "gpu", False, "h100"),
    ],
)
def test_a_target_knows_its_topology_and_chip(text, platform, emulated, chip):
    target = parse_target(text)
    assert (target.text, target.platform, target.emulated) == (text, platform, emulated)
    assert target.topology == parse_topology(text)
    assert target.chip.name == chip


def test_local_is_what_this_process_has():
    target = parse_target("local")
    assert (target.platform, target.emulated) == ("local", False)
    assert devices(target) == jax.devices()
    assert target.topology.text == f"cpu:{len(jax.devices())}"


def test_reading_targets_imports_no_jax():
    code = (
        "import sys; from spmdlab.targets import parse_target as p\n"
        "p('local'), p('v5e:4x4').chip, p('cpu:8').topology\n"
        "print('jax' in sys.modules)"
    )
    assert output(python(code)) == "False"


def test_chip_overrides_reach_only_their_chip():
    overrides = {"v5e": {"hbm_bytes": 1e9}}
    assert parse_target("v5e:4x4", overrides).chip.hbm_bytes == 1e9
    assert parse_target("v6e:4x4", overrides).chip == parse_target("v6e:4x4").chip
    assert hash(parse_target("v5e:4x4", overrides)) == hash(parse_target("v5e:4x4", overrides))


@pytest.mark.parametrize(
    "overrides", [{"v7": {}}, {"v5e": {"hbm": 1.0}}, {"v6e": {"hbm_bytes": 0}}]
)
def test_a_wrong_override_is_refused_even_for_another_chip(overrides):
    with pytest.raises(ConfigError):
        parse_target("v5e:4x4", overrides)


def test_cpu_devices_are_the_first_of_the_process():
    assert devices(parse_target("cpu:4")) == jax.devices("cpu")[:4]


def test_more_cpu_devices_than_there_are_is_refused_with_what_to_do():
    have = len(jax.devices("cpu"))
    for act in (lambda: devices(parse_target("cpu:999")), lambda: prepare_environment(["cpu:999"])):
        with pytest.raises(TargetError, match=f"started with {have}; .*JAX_NUM_CPU_DEVICES=999"):
            act()


def test_preparing_after_jax_started_is_fine_when_enough_is_there():
    prepare_environment(["cpu:8", "cpu:2", "local"])


def test_gpu_devices_come_later():
    with pytest.raises(TargetError, match="comes in a later release; use 'local'"):
        devices(parse_target("h100:1x8"))


def test_prepares_a_fresh_process():
    code = (
        "import os; from spmdlab.targets import *\n"
        "prepare_environment(['cpu:3', 'v5e:2x2', 'cpu:5'])\n"
        "import jax\n"
        "print(len(jax.devices()), jax.default_backend(), os.environ['JAX_PLATFORMS'],\n"
        "      os.environ['ALLOW_MULTIPLE_LIBTPU_LOAD'], os.environ['TPU_SKIP_MDS_QUERY'])"
    )
    assert output(python(code)) == "5 cpu cpu 1 1"
    # Also when jax was imported before, which is when it reads its variables.
    code = f"import jax\n{code}\nprint(jax.config.jax_platforms)"
    assert output(python(code)) == "5 cpu cpu 1 1\ncpu"


def test_local_leaves_the_platform_and_the_machines_own_tpu_alone():
    code = (
        "import os; from spmdlab.targets import *\n"
        "prepare_environment(['local', 'v5e:2x2'])\n"
        "print([name for name in ('JAX_PLATFORMS', 'TPU_WORKER_HOSTNAMES',\n"
        "       'TPU_ACCELERATOR_TYPE', 'ALLOW_MULTIPLE_LIBTPU_LOAD') if name in os.environ])"
    )
    assert output(python(code)) == "['ALLOW_MULTIPLE_LIBTPU_LOAD']"


def test_another_platform_already_started_is_refused(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    with pytest.raises(TargetError, match=r"already started on tpu.*JAX_PLATFORMS=cpu"):
        prepare_environment(["cpu:2"])


def test_a_missing_libtpu_names_the_extra(monkeypatch):
    monkeypatch.setattr(targets.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delenv("TPU_LIBRARY_PATH", raising=False)
    with pytest.raises(TargetError, match=r"pip install 'spmdlab\[tpu\]'"):
        devices(parse_target("v5e:8x8"))


@needs_libtpu
@pytest.mark.parametrize(
    "text",
    [
        *("v5e:1x1", "v5e:2x2", "v5e:2x4", "v5e:4x4", "v5e:4x8", "v5e:8x8", "v5e:8x16"),
        *("v5e:16x16", "v6e:1x1", "v6e:2x2", "v6e:2x4", "v6e:4x4", "v6e:4x8", "v6e:8x8"),
        *("v6e:8x16", "v6e:16x16", "v4:2x2x1", "v4:2x2x2", "v4:2x2x4", "v4:2x4x4"),
        *("v4:4x4x4", "v4:8x8x12", "v4:16x16x16", "v5p:2x2x1", "v5p:2x2x2", "v5p:2x2x4"),
        *("v5p:2x4x4", "v5p:4x4x4", "v5p:4x4x12", "v5p:16x16x24", "tpu7x:2x2x1", "tpu7x:2x2x2"),
        *("tpu7x:2x2x4", "tpu7x:2x4x4", "tpu7x:4x4x4", "tpu7x:4x8x8", "2*v5e:2x4", "3*v4:2x2x1"),
        "2*tpu7x:2x2x1",
    ],
)
def test_libtpu_describes_the_slice_as_we_do(text):
    """Devices, and where they sit, fill the shape we parsed; and `topology_of` finds it again."""
    target = parse_target(text)
    topology = target.topology
    found = devices(target)
    assert len(found) == topology.num_devices
    rank = len(topology.shape)
    places = {
        (getattr(d, "slice_index", None) or 0, *d.coords[:rank], d.core_on_chip) for d in found
    }
    assert len(places) == topology.num_devices
    limits = (topology.num_slices, *topology.shape, topology.devices_per_chip)
    for place in zip(*places, strict=True):
        assert (min(place), max(place) + 1) == (0, limits[0])
        limits = limits[1:]
    assert topology_of(found) == topology


@needs_libtpu
def test_the_same_slice_gives_the_same_devices():
    assert devices(parse_target("v5e:2x4")) == devices(parse_target("1*v5e:2x4"))


@needs_libtpu
def test_what_libtpu_refuses_is_one_line(monkeypatch):
    from jax.experimental import topologies

    def refuse(**_):
        raise RuntimeError("ABORTED: Internal error when accessing libtpu\nlockfile /tmp/x")

    monkeypatch.setattr(topologies, "get_topology_desc", refuse)
    targets._described.cache_clear()
    with pytest.raises(TargetError, match="another process holds libtpu") as caught:
        devices(parse_target("v5e:2x2"))
    assert "\n" not in str(caught.value)


@needs_libtpu
def test_two_processes_compile_at_once():
    """Both hold libtpu at one time: each waits for the other before it ends."""
    code = (
        "import sys; from spmdlab.targets import *; prepare_environment(['v5e:2x2'])\n"
        "import jax; from jax.sharding import *; import numpy as np\n"
        "mesh = Mesh(np.array(devices(parse_target('v5e:2x2'))), ('x',))\n"
        "x = jax.ShapeDtypeStruct((8, 8), 'float32',\n"
        "                         sharding=NamedSharding(mesh, PartitionSpec('x')))\n"
        "jax.jit(lambda x: x @ x).lower(x).compile(); print('ready', flush=True)\n"
        "sys.stdin.read(); jax.jit(lambda x: x + x).lower(x).compile(); print('done')"
    )
    pair = [
        subprocess.Popen(
            [sys.executable, "-c", code],
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for _ in range(2)
    ]
    assert [process.stdout.readline() for process in pair] == ["ready\n"] * 2
    assert [process.communicate("go", timeout=120)[0] for process in pair] == ["done\n"] * 2


def fake(kind, platform="tpu", **fields):
    return types.SimpleNamespace(device_kind=kind, platform=platform, process_index=0, **fields)


def test_local_tpu_devices_form_the_smallest_slice_around_them():
    found = [fake("TPU v5 lite", coords=[x, y, 0], core_on_chip=0) for y in (2, 3) for x in (0, 1)]
    assert topology_of(found).text == "v5e:2x2"
    with pytest.raises(TargetError, match="3 devices do not fill v5e:2x2"):
        topology_of(found[:3])


def test_local_gpus_are_nodes_of_processes():
    found = [fake("NVIDIA H100 80GB HBM3", "gpu") for _ in range(8)]
    for device in found[4:]:
        device.process_index = 1
    assert topology_of(found).text == "h100:2x4"
    with pytest.raises(TargetError, match="7 devices over 2 processes"):
        topology_of(found[1:])


@pytest.mark.parametrize("kind", ["TPU v3", "NVIDIA A100-SXM4-40GB", "TPU v5x"])
def test_local_devices_without_figures_are_refused(kind):
    with pytest.raises(
        TargetError, match=f"no figures for devices of kind '{kind}'.  Known: TPU v4"
    ):
        topology_of([fake(kind, coords=[0, 0, 0], core_on_chip=0)])


def test_local_v4_with_two_devices_per_chip_is_refused():
    found = [fake("TPU v4", coords=[0, 0, 0], core_on_chip=core) for core in (0, 1)]
    with pytest.raises(TargetError, match="2 devices per chip, and our figures for v4 are for 1"):
        topology_of(found)
