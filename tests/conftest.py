"""Runs every test on eight emulated CPU devices."""

import difflib
import os
import pathlib

# Several test processes may hold libtpu at once, and none may wait for a metadata server.
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
# Machine code that is not optimised takes half the time to make; the HLO is the same, to the
# letter.  In the environment, so that the workers that tests start have it too.
os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "1")

import jax
import pytest
from hypothesis import settings

# The same examples in every run, unless asked: --hypothesis-profile=long.
settings.register_profile("default", derandomize=True, database=None)
settings.register_profile("long", derandomize=False)
settings.load_profile("default")

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

GOLDEN = pathlib.Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption("--update-golden", action="store_true", help="Rewrite tests/golden.")


def pytest_sessionstart(session):
    assert len(jax.devices()) == 8, f"JAX started before conftest: {jax.devices()}"


@pytest.fixture
def golden(request):
    """Compares text with ``tests/golden/<name>``; a missing file is a failure."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--update-golden"):
            path.parent.mkdir(exist_ok=True)
            path.write_text(text)
            return
        if not path.exists():
            pytest.fail(f"No golden {path}.  Run pytest --update-golden, read the diff, commit it.")
        lines = difflib.unified_diff(
            path.read_text().splitlines(), text.splitlines(), "golden", "now", lineterm=""
        )
        if diff := "\n".join(lines):
            pytest.fail(f"{name} changed:\n{diff}", pytrace=False)

    return check
