"""Runs of one program share its compilation, which is quick rather than good."""

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

BEFORE = {
    "jax_disable_most_optimizations": False,
    "jax_compilation_cache_dir": None,
    "jax_persistent_cache_min_compile_time_secs": 1.0,
    "jax_persistent_cache_min_entry_size_bytes": 0,
}


@pytest.fixture(scope="module", autouse=True)
def compile_once(tmp_path_factory):
    during = (True, str(tmp_path_factory.getbasetemp() / "compiled"), 0.0, -1)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in zip(BEFORE, during, strict=True):
            jax.config.update(name, value)
            patch.setenv(name.upper(), str(value))  # For processes that tests start.
        compilation_cache.reset_cache()
        yield
    for name, value in BEFORE.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
