"""R1 of directions of the normalised residual stream, which qkv and gate_up read."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Array, Float

from qrot.calibrate.capture import Captured
from qrot.learn.start import Start
from qrot.sites import SITES

_SITES = tuple(name for name, site in SITES.items() if site.rotation == "residual")
Matrix = Float[np.ndarray, "n n"]


def pca(captured: Captured, means: Mapping[str, Array]) -> Matrix:
    """The principal directions (Ashkboos et al.: SliceGPT, 2024, arXiv 2401.15024).

    Args:
        captured: vectors.
        means: of the sites, which are taken off; {} for none.
    """
    size = np.zeros((_width(captured),) * 2)
    for name in _SITES:
        for i in range(len(captured.inputs[name])):
            size = size + _inputs(captured, means, name, i)
    return np.linalg.eigh(size)[1]


def balanced(captured: Captured, means: Mapping[str, Array]) -> Matrix:
    """Directions that balance how large the stream is along them against what errors there cost.

    See `balancing`. Arguments as for `pca`; the vectors with their gradients.
    """
    size = np.zeros((_width(captured),) * 2)
    costs = size
    assert captured.gradients is not None
    for name in _SITES:
        for i in range(len(captured.inputs[name])):
            inputs = _inputs(captured, means, name, i)
            g = captured.gradients[name][i].astype(np.float32)
            gradients = (g.T * captured.weight) @ g
            # Each site counts by what isotropic errors of its size would cost.
            share = np.sqrt(np.trace(inputs) * np.trace(gradients))
            size = size + share * inputs / np.trace(inputs)
            costs = costs + share * gradients / np.trace(gradients)
    return np.linalg.eigh(balancing(size, costs))[1]


def balancing(size: Matrix, costs: Matrix) -> Matrix:
    """The geometric mean of size^-1 and costs, both symmetric positive definite.

    Rounding x A with one step for all channels makes an error of covariance ~ tr(A^T size A)
    (A A^T)^-1, which costs tr(costs (A A^T)^-1). Among all invertible A the product is least where
    A A^T is this mean M, since then M size M = costs (as in balanced truncation of linear systems).
    A rotation with scales has A = R f: eigenvectors of M, and the square roots of its eigenvalues.

    Args:
        size: second moment of what is rounded.
        costs: second moment of the derivatives there.
    """
    root, inverse = _powers(size)
    middle, _ = _powers(root @ costs @ root)
    return inverse @ middle @ inverse


def _powers(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Square root and inverse square root of a symmetric matrix; tiny eigenvalues are raised."""
    values, vectors = np.linalg.eigh(matrix)
    values = np.maximum(values, 1e-6 * values.max())
    return (vectors * np.sqrt(values)) @ vectors.T, (vectors / np.sqrt(values)) @ vectors.T


def _width(captured: Captured) -> int:
    return captured.inputs[_SITES[0]].shape[-1]


def _inputs(captured: Captured, means: Mapping[str, Array], name: str, i: int) -> Matrix:
    """Second moment of what a site of layer i reads, about the means."""
    x = captured.inputs[name][i].astype(np.float32)
    x = x - np.asarray(means[name])[i] if name in means else x
    return (x.T * captured.weight) @ x


PCA = Start("pca", directions=pca)
BALANCED = Start("balanced", directions=balanced, gradients=True)
