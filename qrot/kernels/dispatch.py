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
from jax.core import Tracer

from qrot.errors import InputError

IMPLEMENTATIONS = ("xla", "pallas_tpu", "mosaic_gpu")
_emulated: ContextVar[tuple[str, Any] | None] = ContextVar("emulated", default=None)


def choose(
    name: str,
    implementation: str | None,
    refusals: dict[str, Callable[[], str | None]],
    arguments: Any,
) -> str:
    """The implementation of a kernel that is to run.

    Args:
        name: of the kernel.
        implementation: one of IMPLEMENTATIONS, or None for that of the device of the arguments, or
            `xla` where it cannot do what is asked for.
        refusals: by implementation, a function that says why it cannot, or returns None where it
            can.
        arguments: a pytree of all arrays that the kernel is given.

    Raises:
        InputError: where a named one is not there or cannot.
    """
    if implementation not in (None, *IMPLEMENTATIONS):
        names = ", ".join(IMPLEMENTATIONS)
        raise InputError(f"implementation={implementation!r} is none of {names}")
    if implementation == "xla":
        return "xla"
    here, device = _suited(arguments)
    wanted = implementation or here
    if wanted == "xla":
        return "xla"
    if wanted not in refusals:
        why = "there is no such kernel"
    elif wanted != here:
        why = f"the device is {device}"
    else:
        why = refusals[wanted]()
    if why is None:
        return wanted
    if implementation is None:
        return "xla"
    raise InputError(f"implementation={implementation!r} of {name} is not available: {why}")


def device_of(arguments: Any) -> Any:
    """The `jax.Device` that a computation runs on.

    Args:
        arguments: a pytree of its arrays. Concrete ones say where they are, those first that are
            committed to a device; if all are traced, it is a device of the mesh that is set
            (`jax.set_mesh`), or the default one (`jax.default_device`).
    """
    arrays = [x for x in jax.tree.leaves(arguments) if isinstance(x, jax.Array)]
    arrays = [x for x in arrays if not isinstance(x, Tracer)]
    if arrays:
        placed = next((x for x in arrays if x.committed), arrays[0])
        return next(iter(placed.devices()))
    config: Any = jax.config  # whose fields are made when jax is imported
    meant = jax.sharding.get_abstract_mesh().abstract_device or config.jax_default_device
    if isinstance(meant, jax.Device):
        return meant
    platform = meant if meant is None or isinstance(meant, str) else meant.platform
    return jax.local_devices(backend=platform)[0]


def _suited(arguments: Any) -> tuple[str, str]:
    """The implementation for the device of the arguments, and the device in words."""
    if emulated := _emulated.get():
        return emulated[0], f"an emulated one for {emulated[0]}"
    device = device_of(arguments)
    if device.platform == "tpu":
        return "pallas_tpu", "a TPU"
    if device.platform != "gpu":
        return "xla", f"a {device.platform.upper()}"
    capability = device.compute_capability
    if not capability.startswith("9."):  # wgmma is Hopper's alone: Blackwell has another
        return "xla", f"a GPU of compute capability {capability}, not Hopper's 9"
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

    Functions under `jit` must be traced within it: their caches know nothing of it.

    Args:
        implementation: one of IMPLEMENTATIONS.
        interpret: as for `pl.pallas_call` or `plgpu.kernel`.
    """
    token = _emulated.set((implementation, interpret))
    try:
        yield
    finally:
        _emulated.reset(token)
