"""Which implementation of a kernel runs: the one that is named, or the one that suits the device.

A kernel exists in plain JAX (`xla`, everywhere), for TPU (`pallas_tpu`) and for Hopper GPUs
(`mosaic_gpu`); not every kernel in all three.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import jax

from qrot.errors import InputError

IMPLEMENTATIONS = ("xla", "pallas_tpu", "mosaic_gpu")
_emulated: ContextVar[tuple[str, Any] | None] = ContextVar("emulated", default=None)


def choose(
    name: str, implementation: str | None, refusals: dict[str, Callable[[], str | None]]
) -> str:
    """The implementation of the kernel `name` that is to run.

    implementation: one of IMPLEMENTATIONS, or None for that of the default device, or `xla` where
      it cannot do what is asked for.
    refusals: by implementation, a function that says why it cannot, or returns None where it can.
    Raises InputError where a named one is not there or cannot.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        names = ", ".join(IMPLEMENTATIONS)
        raise InputError(f"implementation={implementation!r} is none of {names}")
    if implementation == "xla":
        return "xla"
    here, device = _of_the_device()
    wanted = implementation or here
    if wanted == "xla":
        return "xla"
    if wanted not in refusals:
        why = "there is no such kernel"
    elif wanted != here:
        why = f"the default device is {device}"
    else:
        why = refusals[wanted]()
    if why is None:
        return wanted
    if implementation is None:
        return "xla"
    raise InputError(f"implementation={implementation!r} of {name} is not available: {why}")


def _of_the_device() -> tuple[str, str]:
    """The implementation for the default device, and the device in words."""
    if emulated := _emulated.get():
        return emulated[0], f"an emulated one for {emulated[0]}"
    backend = jax.default_backend()
    if backend == "tpu":
        return "pallas_tpu", "a TPU"
    if backend != "gpu":
        return "xla", f"a {backend.upper()}"
    capability = str(getattr(jax.local_devices()[0], "compute_capability", ""))
    if not capability.startswith("9."):  # wgmma is Hopper's alone: Blackwell has another
        return "xla", f"a GPU of compute capability {capability or 'unknown'}, not Hopper's 9"
    if importlib.util.find_spec("absl") is None:
        return "xla", "a Hopper GPU, but absl-py, which Mosaic GPU needs, is not installed"
    return "mosaic_gpu", "a Hopper GPU"


def interpreting() -> Any:
    """What kernels pass to Pallas as `interpret`: False, but within `emulated`."""
    emulated = _emulated.get()
    return False if emulated is None else emulated[1]


@contextmanager
def emulated(implementation: str, interpret: Any = True) -> Iterator[None]:
    """Within it, kernels run as on the device of this implementation, interpreted: for tests.

    interpret: as for `pl.pallas_call` or `plgpu.kernel`. Functions under `jit` must be traced
    within it: their caches know nothing of it.
    """
    token = _emulated.set((implementation, interpret))
    try:
        yield
    finally:
        _emulated.reset(token)
