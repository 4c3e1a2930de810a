"""From the tensors of a file to what is put on a network, none of it on trust."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from qrot.errors import InputError
from qrot.files.plain import short, shown
from qrot.hadamard.factors import hadamard_factors, hadamard_matrix
from qrot.rotation.check import check_fit, checked
from qrot.rotation.forms import FORMS, Hadamard, Rotation
from qrot.rotation.transform import Online, Transform
from qrot.sites import INPUTS, ONLINE, ROTATIONS, SITES, Sizes

T = TypeVar("T", bound=Transform | Online)
Arrays = Mapping[str, np.ndarray]

_BESIDE = {
    "scales": tuple(dict.fromkeys(site.scale for site in SITES.values() if site.scale)),
    "shifts": INPUTS,
    "clips": tuple(SITES),
}
_ROTATIONS = {Transform: ROTATIONS, Online: ONLINE}
_AXES = {"signs": 1, "blocks": 3}  # of a part, its stack not counted; 2 for all others


def acting_from(
    arrays: Arrays,
    forms: Any,
    kind: type[T],
    sizes: Sizes | None = None,
    *,
    factors: bool = True,
) -> T:
    """What `qrot.rotation.store.acting_tensors` has taken apart.

    Args:
        arrays: by dotted name; may lie in a file, of which no more is read than is right so far.
        forms: of the rotations, as a file has them.
        kind: of what acts, `Transform` or `Online`.
        sizes: of the network that it is put on; None where that is not known, which leaves it to
            `fuse` to compare shapes.
        factors: whether Hadamard rotations must come with their factors. Those of format 2 do not;
            the qrot that wrote it had the matrices of this one.

    Raises:
        InputError: where a name, a shape, a dtype or a number is not what it has to be (see
            `check_fit` and `checked`), or a Hadamard rotation was made with other matrices than
            this qrot has, or does not say with which.
    """
    beside: dict[str, Any] = {tree: {} for tree in vars(kind()) if tree != "rotations"}
    parts: dict[str, dict[str, np.ndarray]] = {}
    for name, x in arrays.items():
        tree, _, rest = name.partition(".")
        if tree == "rotations":
            rotation, _, part = rest.partition(".")
            parts.setdefault(rotation, {})[part] = x
        elif tree in beside and rest in _BESIDE[tree]:
            if x.ndim != (1 if tree == "clips" else 2 + (tree == "scales" and SITES[rest].cached)):
                raise InputError(f"{name} cannot have the shape {list(x.shape)}")
            beside[tree][rest] = _floats(name, x)
        else:
            raise InputError(f"holds {shown(name)}, which no rotation file has")
    _check_names(parts, forms, _ROTATIONS[kind])
    rotations = {name: _rotation(name, own, forms[name]) for name, own in parts.items()}
    trees = {"rotations": rotations, **beside}
    if sizes is None:
        _check_layers(trees)
    else:
        check_fit(trees, sizes)
    trees = checked(trees)
    for name, own in parts.items():
        _check_factors(name, trees["rotations"][name], own, needed=factors)
    return kind(**jax.tree.map(jnp.asarray, trees))


def _check_layers(trees: Mapping[str, Mapping[str, Any]]) -> None:
    """Raise InputError where parts are of different numbers of layers."""
    layers = {
        f"{tree}.{name}": stack[0]
        for tree, own in trees.items()
        for name, x in own.items()
        if (stack := x.stack if tree == "rotations" else x.shape)
    }
    for name, count in layers.items():
        first, wanted = next(iter(layers.items()))
        if count != wanted:
            raise InputError(f"{name} is of {count} layers, but {first} is of {wanted}")


def _check_names(parts: Mapping[str, Arrays], forms: Any, known: tuple[str, ...]) -> None:
    if not isinstance(forms, dict):
        raise InputError(f"its forms are {short(forms)}, not one for each rotation")
    if unknown := [name for name in {**forms, **parts} if name not in known]:
        raise InputError(f"there is no rotation {shown(unknown[0])}, but {', '.join(known)}")
    if parts.keys() != forms.keys():
        raise InputError(f"its tensors are not those of {', '.join(forms) or 'no rotation'}")


def _rotation(name: str, parts: Arrays, about: Any) -> Rotation:
    """A rotation whose parts have the dtype and the axes of its form."""
    about = about if isinstance(about, dict) else {}
    form = FORMS.get(about["form"]) if isinstance(about.get("form"), str) else None
    static = {key: value for key, value in about.items() if key != "form"}
    own = {part: x for part, x in parts.items() if not (form is Hadamard and _is_factor(part))}
    fields = [] if form is None else [*form.__dataclass_fields__]
    if not fields or sorted([*own, *static]) != sorted(fields) or "block" in own:
        raise InputError(f"the rotation {name} is of no form that qrot has")
    for part, x in own.items():
        _check_axes(f"rotations.{name}.{part}", _floats(f"rotations.{name}.{part}", x), part)
    if form is Hadamard:
        block, n = static["block"], own["signs"].shape[-1]
        if block is not None and (type(block) is not int or block < 1 or n % block):
            raise InputError(f"rotations.{name}: a block of {short(block)} does not divide {n}")
    if "left" in own:
        signs, left, right = (own[part].shape for part in ("signs", "left", "right"))
        same = signs[:-1] == left[:-2] == right[:-2]
        if not same or left[-1] * right[-1] != signs[-1]:
            raise InputError(
                f"rotations.{name}: signs, left and right have the shapes {list(signs)}, "
                f"{list(left)} and {list(right)}, which do not go together"
            )
    return FORMS[about["form"]](**own, **static)


def _floats(name: str, x: np.ndarray) -> np.ndarray:
    if not jnp.issubdtype(x.dtype, jnp.floating):
        raise InputError(f"{name} has the dtype {x.dtype.name}, which is no floating one")
    if not x.size:
        raise InputError(f"{name} is empty")
    return x


def _check_axes(name: str, x: np.ndarray, part: str) -> None:
    axes = _AXES.get(part, 2)
    if x.ndim < axes or (axes > 1 and x.shape[-1] != x.shape[-2]):
        raise InputError(f"{name} cannot have the shape {list(x.shape)}")


def factors_of(rotation: Rotation) -> dict[str, np.ndarray]:
    """The +-1 factors of a Hadamard matrix by name; {} for other forms."""
    if not isinstance(rotation, Hadamard):
        return {}
    orders = hadamard_factors(rotation.block or rotation.size)
    return {f"factor{i}": np.array(hadamard_matrix(n)) for i, n in enumerate(orders)}


def _is_factor(part: str) -> bool:
    return part.startswith("factor")


def _check_factors(name: str, rotation: Rotation, parts: Arrays, *, needed: bool) -> None:
    """Raise InputError where a Hadamard rotation was made with other matrices than this qrot's."""
    stored = {part: x for part, x in parts.items() if _is_factor(part)}
    if not isinstance(rotation, Hadamard) or not (stored or needed):
        return
    if not stored:
        raise InputError(f"{name} comes without the factors of its Hadamard matrix")
    ours = [*factors_of(rotation).values()]
    theirs = [x for i in range(len(stored)) for x in [stored.get(f"factor{i}")] if x is not None]
    size = math.prod(len(x) for x in ours)
    same = len(theirs) == len(stored) and all(_of_signs(x) for x in theirs)
    same = same and size == math.prod(len(x) for x in theirs)
    if same:
        # One vector of random numbers tells any two matrices apart, however they are factored.
        probe = np.random.default_rng(0).standard_normal(size)
        same = np.allclose(_product(probe, theirs), _product(probe, ours))
    if not same:
        raise InputError(f"{name} was made with other Hadamard matrices than this qrot has")


def _of_signs(x: np.ndarray) -> bool:
    """Whether it is a square matrix of integers +1 and -1."""
    square = x.ndim == 2 and x.shape[0] == x.shape[1]
    return square and x.dtype == np.int8 and bool((np.abs(x) == 1).all())


def _product(x: np.ndarray, factors: list[np.ndarray]) -> np.ndarray:
    for factor in factors:
        x = np.einsum("sk,st->kt", x.reshape(len(factor), -1), factor.astype(np.float64))
    return x.ravel()


def translated(arrays: Arrays, blocks: Any) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Arrays and forms of a file of format 2 or 3, in which a matrix has no name of its own.

    Its number of axes says what it is: a whole one has two beside those of layers, blocks three,
    one for each kv head an axis more before the blocks.

    Args:
        arrays: by dotted name.
        blocks: of the rotations with signs, as the file has them.

    Raises:
        InputError: where one of these has none.
    """
    if not isinstance(blocks, dict):
        raise InputError(f"its blocks are {short(blocks)}, not one for each rotation with signs")
    found: dict[str, np.ndarray] = {}
    forms: dict[str, Any] = {
        name: {"form": "kronecker"}
        if f"rotations.{name}.left" in arrays
        else {"form": "hadamard", "block": block}
        for name, block in blocks.items()
    }
    for name, x in arrays.items():
        tree, _, rest = name.partition(".")
        rotation, _, part = rest.partition(".")
        if tree != "rotations" or part:
            found[name] = x
        else:
            if rotation in forms:
                raise InputError(f"has blocks for {rotation}, which has no signs")
            axes = x.ndim - (rotation != "residual")
            if axes == 4 and x.shape[-3] == 1:  # for each kv head a whole one
                x, axes = x[..., 0, :, :], 2
            form = "dense" if axes == 2 else "blocks"
            forms[rotation] = {"form": form}
            found[f"{name}.{'matrix' if form == 'dense' else form}"] = x
    return found, forms
