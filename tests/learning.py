"""Schemes, settings and a call by which a tiny network's rotations are learned in seconds."""

from qrot.grid import Grid
from qrot.learn.loop import learn
from qrot.learn.settings import Learn
from qrot.rotation.forms import orthogonal_parts
from qrot.rotation.random import RotationSites
from qrot.scheme import Scheme

A4 = Grid(4, "asymmetric")
W16A4 = Scheme(Grid(), A4, A4, A4)
W4A4 = Scheme(Grid(4), A4, A4, A4)
SHORT = Learn(
    objective="cross_entropy",
    start="hadamard",
    steps=6,
    batch=2,
    length=16,
    held_out=2,
    evaluate_every=2,
    checkpoint_every=2,
)


def run(network, tokens, settings, scheme, folder, **changes):
    folder.mkdir(exist_ok=True)
    options = {"sites": RotationSites(), "seed": 0, "folder": folder, **changes}
    return learn(network.replace(scheme=scheme), tokens, settings, **options)


def matrix(transform, name):
    """The one orthogonal matrix, or the stack of them, of a rotation."""
    (found,) = orthogonal_parts(transform.rotations[name]).values()
    return found
