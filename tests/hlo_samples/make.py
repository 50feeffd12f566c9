"""Compiles the stack of model.py and writes its HLO beside this file, without machine paths.

python tests/hlo_samples/make.py cpu fsdp_tensor scanned
python tests/hlo_samples/make.py v5e:2x4 fsdp unrolled
"""

import gzip
import os
import pathlib
import re
import sys

os.environ.update(JAX_PLATFORMS="cpu", TPU_SKIP_MDS_QUERY="1", ALLOW_MULTIPLE_LIBTPU_LOAD="1")

import jax

HERE = pathlib.Path(__file__).parent
sys.path.insert(0, str(HERE))


def main(target: str, layout: str, layers: str) -> None:
    import model

    jax.config.update("jax_num_cpu_devices", 8)
    if target == "cpu":
        devices = jax.devices()
    else:
        from jax.experimental import topologies

        slices, _, name = target.rpartition("*")
        described = {"topology_name": name, "num_slices": int(slices or 1)}
        devices = topologies.get_topology_desc(platform="tpu", **described).devices
    text = model.lower(layout, devices, scanned=layers == "scanned").compile().as_text()
    text = text.replace(str(HERE), "/home/user").replace(sys.prefix, "/home/user/venv")
    text = re.sub(r"/[^\"]*/(lib/python3[^\"]*)", r"/home/user/venv/\1", text)
    arguments = " ".join(sys.argv[1:])
    header = f"// jax {jax.__version__}: python tests/hlo_samples/make.py {arguments}\n"
    line = ".".join(jax.__version__.split(".")[:2])
    name = f"jax{line}_{target.partition(':')[0].replace('*', 'x')}_{layout}_{layers}.txt.gz"
    packed = gzip.compress((header + text).encode(), mtime=0)
    (HERE / name).write_bytes(packed)
    print(f"{name}: {len(text)} characters, {len(packed)} bytes")


if __name__ == "__main__":
    main(*sys.argv[1:])
