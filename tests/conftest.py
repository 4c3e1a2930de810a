"""What all tests share: shape checks, a CPU, and tiny models loaded once."""

# ruff: noqa: E402

import os
import sys
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Programs are compiled once: three quarters of the suite's time would go there. Runs that tests
# start as processes of their own find them, too.
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parents[1] / ".cache/jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")
# The threads of LAPACK and of XLA would fight over two cores.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).parent))  # for `models`, whether or not tests is a package

from jaxtyping import install_import_hook

# Before qrot is imported for the first time: every annotation in it is checked from here on.
install_import_hook("qrot", "beartype.beartype")

from functools import cache, partial

import jax
import jax.numpy as jnp
import models
import pytest

from qrot.model.io.load import load


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory):
    """Leave the user's cache alone."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="module", autouse=True)
def _forget_compiled():
    """Drop compiled programs after each file: Linux allows a process 65,530 memory maps, and LLVM
    dies without a word when a suite of compilations has used them up."""
    yield
    jax.clear_caches()


@pytest.fixture(scope="session")
def variant(tmp_path_factory):
    """(name, dtype="float32", **changes to config.json) -> Model; `model.name` is its folder."""

    @cache
    def make(name: str, dtype: str = "float32", **changes):
        folder = tmp_path_factory.mktemp(name)
        architecture, own = models.VARIANTS[name]
        models.write_folder(folder, architecture, **{**own, **changes})
        with jax.enable_x64(dtype == "float64"):
            return load(str(folder), dtype=jnp.dtype(dtype))

    return make


@pytest.fixture
def quick_compile():
    """Compile without optimisation: tiny models take longer to compile than to run."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


@pytest.fixture(scope="session")
def tiny(tmp_path_factory):
    """The folder of a model of 97 words and two texts of 400 of them."""
    import runs

    folder = tmp_path_factory.mktemp("tiny")
    runs.write_tiny(folder)
    return folder


@pytest.fixture
def config(tiny, tmp_path):
    """A run of it by several methods, learned rotations among them."""
    import runs

    return runs.tiny_config(tiny, tmp_path / "run")


@pytest.fixture
def made(tmp_path):
    """(variant, scheme, transform) -> rotation file of a tiny model in a folder of its own."""
    import exports  # which imports all of qrot

    return partial(exports.write_fitted, tmp_path)
