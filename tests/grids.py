"""Numbers to put on a grid, and what becomes of them."""

import jax.numpy as jnp
import numpy as np

from qrot.grid import fake_quantise

KINDS = ("symmetric", "symmetric_half", "asymmetric")


def normal(*shape, seed=0):
    # With a mean of 1, the largest is positive: at absmax/7.5 without clipping, -absmax would fall
    # halfway between two levels, and the last bit of a division would decide.
    return np.random.default_rng(seed).normal(1, 1, shape).astype(np.float32)


def quantise(x, grid, **options):
    return np.asarray(fake_quantise(jnp.asarray(x), grid, **options))
