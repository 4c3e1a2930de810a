"""`export`: one function a format, all of them written whole and, if asked for, verified."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

import qrot
from qrot.errors import InputError
from qrot.progress import Stages
from qrot.export import compressed_tensors, pytorch, spinquant, verify
from qrot.export.fitted import (
    WEIGHTS,
    Fitted,
    by_gptq,
    left_out,
    offline,
    one_layer,
    uses_gptq,
)
from qrot.files import SHARD, whole_folder
from qrot.export.huggingface import stored_dtype, write_huggingface
from qrot.model.params import Layers, Params
from qrot.rotation.forms import Learned, Rotations
from qrot.scheme import Scheme

DTYPES = ("float32", "bfloat16", "float16")
# Of perplexities, or three standard errors where the noise of float32 decides between two levels:
# at 4 bits a change of 1e-6 in the embedding is another network, token by token.
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Options:
    """What the command line asks for beside format and folder; None for the format's own."""

    scheme: str | None = None
    group: int | None = None
    online: bool = False
    weights: str | None = None
    dtype: str | None = None
    shard: int = SHARD


@dataclass(frozen=True)
class Plan:
    """How a format is written, what it then computes, and how PyTorch opens it."""

    write: Callable[[Path, Params | None, Callable], None]  # folder, weights by GPTQ, advance
    load: Callable[[Path], Any]
    lines: tuple[str, ...]  # of the folder's README
    lost: str = ""  # what was learned and is not in it
    learned: Learned | None = None  # in it; None: the function of the model as it came
    scheme: Scheme = field(default_factory=Scheme)
    gptq: bool = False  # whether GPTQ rounds the weights
    dtype: str = "float32"
    signs_folded: bool = False
    exact: bool = False  # compare in float64, where rounding falls the same way on both sides


def export(
    fitted: Fitted,
    out: Path,
    kind: str,
    options: Options,
    stages: Stages,
    *,
    check: bool = False,
) -> tuple[Plan, verify.Difference | None]:
    """Write `out`, a folder that is not there yet, and compare it in PyTorch if `check`.

    Raises InputError, and leaves nothing behind, where the format cannot hold what is asked for or
    PyTorch computes something else.
    """
    if kind not in _PLANS:
        raise InputError(f"--format: {kind!r} is not one of {', '.join(_PLANS)}")
    if options.dtype not in (None, *DTYPES):
        raise InputError(f"--dtype: {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if options.weights not in (None, *WEIGHTS):
        raise InputError(f"--weights: {options.weights!r} is not one of {', '.join(WEIGHTS)}")
    if kind != "compressed-tensors" and (options.scheme or options.group or options.online):
        raise InputError("--scheme, --group and --online go with --format compressed-tensors only")
    _check_installed(kind, check)
    plan = _PLANS[kind](fitted, options)
    if fitted.run.mixed is not None and plan.scheme.rounds_weights and options.scheme is None:
        raise InputError(
            "the run gave each projection its own bits, as no export does: say --scheme"
        )
    layers = fitted.opened.config.num_hidden_layers
    with whole_folder(out) as folder:
        rounded = _by_gptq(fitted, plan, stages) if plan.gptq else None
        with stages.stage(f"writing {kind}", layers, seconds=0.2 * layers) as advance:
            plan.write(folder, rounded, advance)
        (folder / "README.md").write_text(_readme(fitted, kind, plan))
        difference = _verify(folder, fitted, plan, rounded, stages) if check else None
    return plan, difference


def _check_installed(kind: str, check: bool) -> None:
    needed = {"torch"} if kind == "spinquant" else set()
    if check:
        needed |= {"torch", "transformers"}
        needed |= {"compressed_tensors"} if kind == "compressed-tensors" else set()
    if missing := [name for name in sorted(needed) if find_spec(name) is None]:
        raise InputError(f"this needs {', '.join(missing)}: `pip install qrot[export]`")


def _spinquant(fitted: Fitted, options: Options) -> Plan:
    config = fitted.opened.config
    spinquant.spinquant_tensors(fitted.learned.rotations, config)  # refuses before all else

    def write(folder: Path, rounded, advance) -> None:
        spinquant.write_spinquant(folder / spinquant.FILE, fitted.learned.rotations, config)
        advance(config.num_hidden_layers)

    def load(folder: Path) -> Any:
        with tempfile.TemporaryDirectory() as plain:
            write_huggingface(Path(plain), fitted, Learned(Rotations()), dtype="float32")
            model = verify.load_plain(Path(plain))
        return verify.apply_spinquant(model, folder / spinquant.FILE)

    lines = (
        "R.bin holds R1 and R2 as SpinQuant has them. There: `ptq.py --rotate "
        "--optimized_rotation_path R.bin`, with norms folded and no embedding centred.",
        "ExecuTorch's Llama export reads the same file through its SpinQuant R1/R2 option; "
        "`use_spin_quant` adds R4 there.",
    )
    return Plan(write, load, lines, left_out(fitted.learned, scales=False))


def _huggingface(fitted: Fitted, options: Options) -> Plan:
    dtype = options.dtype or stored_dtype(fitted.opened)
    learned = offline(fitted.learned)

    def write(folder: Path, rounded, advance) -> None:
        write_huggingface(
            folder, fitted, learned, dtype=dtype, shard=options.shard, advance=advance
        )

    lines = (
        "Full-precision weights with R1, R2 and scales in them; the network computes what it did "
        "before, and is easier to quantise. `AutoModelForCausalLM.from_pretrained` loads it.",
    )
    return Plan(write, verify.load_plain, lines, left_out(fitted.learned), dtype=dtype)


def _compressed(fitted: Fitted, options: Options) -> Plan:
    scheme = fitted.scheme
    if options.scheme is not None:
        scheme = compressed_tensors.preset(options.scheme, group=options.group)
    elif options.group is not None:
        raise InputError("--group goes with --scheme")
    compressed_tensors.check_scheme(scheme)
    dtype = options.dtype or stored_dtype(fitted.opened)
    full, kept = fitted.learned, offline(fitted.learned)
    online, signed = Rotations(), Rotations()
    if options.online:
        online, signed = compressed_tensors.online_of(full.rotations), full.rotations
        kept = kept.replace(rotations=kept.rotations.replace(down=signed.down))
        full = full.replace(rotations=full.rotations.replace(down=None))  # of what may be lost

    def write(folder: Path, rounded, advance) -> None:
        def layer(i: int, fused: Layers) -> dict[str, np.ndarray]:
            values = None if rounded is None else one_layer(rounded, i)
            return compressed_tensors.integer_tensors(
                i, fused, scheme, jnp.dtype(dtype), signed, values
            )

        quantization = compressed_tensors.quantization_config(scheme, online)
        write_huggingface(
            folder,
            fitted,
            kept,
            dtype=dtype,
            write_layer=layer,
            config={"quantization_config": quantization},
            shard=options.shard,
            advance=advance,
        )
        if options.online:  # compressed-tensors rounds what our module turns
            pytorch.write_online(folder, fitted, online, Scheme(), beside=False)

    gptq = uses_gptq(fitted, options.weights)
    lines: tuple[str, ...] = (
        f"{scheme.name} as integers by {'GPTQ' if gptq else 'rounding to nearest'}, in the format "
        "of compressed-tensors; the cache is not quantised.",
    )
    if options.online:
        load = partial(verify.load_with_module, module=pytorch.MODULE)
        lines += (
            "**Its down_proj needs R4 at run time.** transformers does not read "
            "`transform_config`: `AutoModelForCausalLM.from_pretrained` alone loads it, reports "
            "R4_input.weight as unexpected, and computes something else. In PyTorch use "
            "`qrot_torch.py` of this folder: `from qrot_torch import load; model = load(FOLDER)`. "
            "vLLM reads `transform_config` itself (written as its source reads it; not run).",
        )
    else:
        load = verify.load_plain
        lines += ("`AutoModelForCausalLM.from_pretrained` loads it, and so does vLLM (not run).",)
    return Plan(
        write,
        load,
        lines,
        left_out(full),
        kept,
        scheme,
        gptq,
        dtype,
        signs_folded=options.online,
    )


def _torch(fitted: Fitted, options: Options) -> Plan:
    dtype, scheme = options.dtype or "float32", fitted.scheme

    def write(folder: Path, rounded, advance) -> None:
        def layer(i: int, fused: Layers) -> dict[str, np.ndarray]:
            values = None if rounded is None else one_layer(rounded, i)
            return pytorch.rounded_tensors(i, fused, scheme, jnp.dtype(dtype), values)

        write_huggingface(
            folder,
            fitted,
            fitted.learned,
            dtype=dtype,
            write_layer=layer,
            shard=options.shard,
            advance=advance,
        )
        pytorch.write_pytorch(folder, fitted)

    gptq = uses_gptq(fitted, options.weights)
    by = " by GPTQ" if gptq else ""
    lines = (
        f"The network at {scheme.name} as qrot judged it: weights hold the values on their "
        f"grid{by}; activations, keys and values are rounded by hooks.",
        "`from qrot_torch import load; model = load(FOLDER)`. Loaded without that module it is "
        "not this network: its down_proj expects rotated inputs.",
        "`apply_rotations(model, 'rotations.safetensors')` of the same module does it to the "
        "original model, weights unrounded.",
    )
    load = partial(verify.load_with_module, module=pytorch.MODULE)
    exact = dtype == "float32" and scheme != replace(Scheme(), weights=scheme.weights)
    return Plan(write, load, lines, "", fitted.learned, scheme, gptq, dtype, exact=exact)


_PLANS = {
    "spinquant": _spinquant,
    "huggingface": _huggingface,
    "compressed-tensors": _compressed,
    "torch": _torch,
}


def _by_gptq(fitted: Fitted, plan: Plan, stages: Stages) -> Params | None:
    """All layers as GPTQ rounds them, calibrated on the run's text."""
    if plan.learned is None or not plan.scheme.rounds_weights:
        return None
    with stages.stage("reading and fusing", seconds=15.0):
        params, online, _ = verify.fused(fitted, plan.learned, signs_folded=plan.signs_folded)
    return by_gptq(fitted, params, online, plan.scheme, stages)


def _verify(
    folder: Path, fitted: Fitted, plan: Plan, rounded: Params | None, stages: Stages
) -> verify.Difference:
    rows, config = verify.windows_of(fitted.opened), fitted.opened.config
    dtype = "float64" if plan.exact else "float32"
    with stages.stage("loading both", seconds=15.0):
        ours = verify.logits_in_qrot(
            fitted,
            plan.learned,
            plan.scheme,
            rounded=rounded,
            signs_folded=plan.signs_folded,
            dtype=dtype,
        )
        theirs = verify.logits_in_torch(plan.load(folder), config, dtype=dtype)
    with stages.stage("comparing", len(rows), seconds=4.0 * len(rows)) as advance:
        difference = verify.compare(ours, theirs, rows, dtype=dtype, advance=advance)
    allowed = _TOLERANCE[plan.dtype]
    if plan.scheme.activations.on and not plan.exact:
        allowed = max(allowed, 3 * difference.error)
    if not difference.relative <= allowed:
        raise InputError(f"the export computes something else, and was not kept: {difference}")
    return difference


def _readme(fitted: Fitted, kind: str, plan: Plan) -> str:
    about = fitted.metadata
    name = Path(str(about["model"])).name
    lines = [f"# {name}, rotated ({kind})", *plan.lines]
    if plan.lost:
        lines.append(f"Learned, but not in this format: {plan.lost}.")
    known = [
        f"{key.replace('_', ' ')} {about[key]}"
        for key in ("objective", "steps", "seed", "trained_weight_bits", "text")
        if about.get(key) is not None
    ]
    lines.append(
        f"Made by qrot {qrot.__version__} from {about['rotations']}, fitted to {about['model']} "
        f"(sha256 {about['digest']})" + (f": {', '.join(known)}." if known else ".")
    )
    return "\n\n".join(lines) + "\n"
