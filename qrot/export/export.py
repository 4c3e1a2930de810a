"""`export`: one function a format, all of them written whole and, if asked for, verified."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp

import qrot
from qrot.errors import InputError
from qrot.experiment.stages import Stages
from qrot.export import compressed_tensors, pytorch, spinquant, verify
from qrot.export.fitted import Fitted, left_out, offline
from qrot.export.folder import SHARD, whole_folder
from qrot.export.huggingface import stored_dtype, write_huggingface
from qrot.grid import Scheme
from qrot.rotation.rotations import Learned, Rotations

FORMATS = ("spinquant", "huggingface", "compressed-tensors", "torch")
DTYPES = ("float32", "bfloat16", "float16")
# Of perplexities. Where a number lies between two levels, float noise decides, in all layers.
_TOLERANCE = {"float32": 1e-3, "float16": 1e-2, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Options:
    """What the command line asks for beside format and folder; None for the format's own."""

    scheme: str | None = None
    group: int | None = None
    online: bool = False
    dtype: str | None = None
    shard: int = SHARD


@dataclass(frozen=True)
class Exported:
    """What a format holds, so that qrot can compute the same, and how PyTorch opens it."""

    learned: Learned | None  # None: the function of the model as it came
    scheme: Scheme
    load: Callable[[Path], Any]
    lost: str  # what was learned and is not in it
    lines: tuple[str, ...]  # of the folder's README
    dtype: str = "float32"


def export(
    fitted: Fitted,
    out: Path,
    kind: str,
    options: Options,
    stages: Stages,
    *,
    check: bool = False,
) -> tuple[Exported, verify.Difference | None]:
    """Write `out`, a folder that is not there yet, and compare it in PyTorch if `check`.

    Raises InputError, and leaves nothing behind, where the format cannot hold what is asked for or
    PyTorch computes something else.
    """
    if kind not in FORMATS:
        raise InputError(f"--format: {kind!r} is not one of {', '.join(FORMATS)}")
    if options.dtype not in (None, *DTYPES):
        raise InputError(f"--dtype: {options.dtype!r} is not one of {', '.join(DTYPES)}")
    if kind != "compressed-tensors" and (options.scheme or options.group or options.online):
        raise InputError("--scheme, --group and --online go with --format compressed-tensors only")
    _needs_torch(kind if not check else "verify")
    write = {
        "spinquant": _spinquant,
        "huggingface": _huggingface,
        "compressed-tensors": _compressed,
        "torch": _torch,
    }[kind]
    layers = fitted.opened.config.num_hidden_layers
    seconds = 0.2 * layers
    with whole_folder(out) as folder:
        with stages.stage(f"writing {kind}", layers, seconds=seconds) as advance:
            exported = write(folder, fitted, options, advance)
        (folder / "README.md").write_text(_readme(fitted, kind, exported))
        difference = None
        if check:
            difference = _verify(folder, fitted, exported, stages)
    return exported, difference


def _needs_torch(kind: str) -> None:
    needs = {"spinquant": "torch", "compressed-tensors": None, "huggingface": None}
    try:
        if kind in ("spinquant", "torch", "verify"):
            import torch  # noqa: F401
        if kind == "verify":
            import transformers  # noqa: F401
    except ImportError as error:
        raise InputError(
            f"this needs {needs.get(kind) or 'torch and transformers'}: `pip install qrot[export]`"
        ) from error


def _spinquant(folder: Path, fitted: Fitted, options: Options, advance) -> Exported:
    spinquant.write_spinquant(
        folder / spinquant.FILE, fitted.learned.rotations, fitted.opened.config
    )
    advance(fitted.opened.config.num_hidden_layers)

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
    lost = left_out(fitted.learned, scales=False)
    return Exported(None, Scheme(), load, lost, lines)


def _huggingface(folder: Path, fitted: Fitted, options: Options, advance) -> Exported:
    dtype = options.dtype or stored_dtype(fitted.opened)
    learned = offline(fitted.learned)
    write_huggingface(folder, fitted, learned, dtype=dtype, shard=options.shard, advance=advance)
    lines = (
        "Full-precision weights with R1, R2 and scales in them; the network computes what it did "
        "before, and is easier to quantise. `AutoModelForCausalLM.from_pretrained` loads it.",
    )
    lost = left_out(fitted.learned)
    return Exported(None, Scheme(), verify.load_plain, lost, lines, dtype)


def _compressed(folder: Path, fitted: Fitted, options: Options, advance) -> Exported:
    scheme = fitted.scheme
    if options.scheme is not None:
        scheme = compressed_tensors.preset(options.scheme, group=options.group)
    elif options.group is not None:
        raise InputError("--group goes with --scheme")
    compressed_tensors.check_scheme(scheme)
    dtype = options.dtype or stored_dtype(fitted.opened)
    learned, online = offline(fitted.learned), Rotations()
    down = fitted.learned.rotations.down
    if options.online:
        online = compressed_tensors.online_of(fitted.learned.rotations)
        learned = learned.replace(rotations=learned.rotations.replace(down=down))
    quantization = compressed_tensors.quantization_config(scheme, online)
    signed = Rotations(down=down) if options.online else online
    write_huggingface(
        folder,
        fitted,
        learned,
        dtype=dtype,
        write_layer=partial(_integers, scheme=scheme, dtype=jnp.dtype(dtype), rotations=signed),
        config={"quantization_config": quantization},
        shard=options.shard,
        advance=advance,
    )
    lines: tuple[str, ...] = (
        f"{scheme.name} as integers, in the format of compressed-tensors; the cache is not "
        "quantised.",
    )
    lost = left_out(
        fitted.learned.replace(rotations=fitted.learned.rotations.replace(down=None))
        if options.online
        else fitted.learned
    )
    if not options.online:
        lines += ("`AutoModelForCausalLM.from_pretrained` loads it, and so does vLLM (not run).",)
        return Exported(learned, scheme, verify.load_plain, lost, lines, dtype)
    rest = Scheme()  # compressed-tensors rounds what it is given
    pytorch.write_online(folder, fitted, online, rest, beside=False)
    lines += (
        "**Its down_proj needs R4 at run time.** transformers does not read `transform_config`: "
        "`AutoModelForCausalLM.from_pretrained` alone loads it, reports R4_input.weight as "
        "unexpected, and computes something else. In PyTorch use `qrot_torch.py` of this folder: "
        "`from qrot_torch import load; model = load(FOLDER)`. vLLM reads `transform_config` itself "
        "(written for it as documented; not run).",
    )
    load = partial(verify.load_with_module, module=pytorch.MODULE)
    return Exported(learned, scheme, load, lost, lines, dtype)


def _integers(i, layer, *, scheme, dtype, rotations):
    return compressed_tensors.integer_tensors(i, layer, scheme, dtype, rotations)


def _torch(folder: Path, fitted: Fitted, options: Options, advance) -> Exported:
    dtype, scheme = options.dtype or "float32", fitted.scheme
    write_huggingface(
        folder,
        fitted,
        fitted.learned,
        dtype=dtype,
        write_layer=lambda i, layer: pytorch.rounded_tensors(i, layer, scheme, jnp.dtype(dtype)),
        shard=options.shard,
        advance=advance,
    )
    pytorch.write_pytorch(folder, fitted)
    lines = (
        f"The network at {scheme.name} as qrot judged it: weights hold the values on their grid; "
        "activations, keys and values are rounded by hooks.",
        "`from qrot_torch import load; model = load(FOLDER)`. Loaded without that module it is "
        "not this network: its down_proj expects rotated inputs.",
        "`apply_rotations(model, 'rotations.safetensors')` of the same module does it to the "
        "original model, weights unrounded.",
    )
    load = partial(verify.load_with_module, module=pytorch.MODULE)
    return Exported(fitted.learned, scheme, load, "", lines, dtype)


def _verify(folder: Path, fitted: Fitted, exported: Exported, stages: Stages) -> verify.Difference:
    rows = verify.windows_of(fitted.opened)
    with stages.stage("loading both", seconds=15.0):
        ours = verify.logits_in_qrot(fitted, exported.learned, exported.scheme)
        theirs = verify.logits_in_torch(exported.load(folder))
    with stages.stage("comparing", len(rows), seconds=4.0 * len(rows)) as advance:
        difference = verify.compare(ours, theirs, rows, advance=advance)
    if not difference.relative <= _TOLERANCE[exported.dtype]:
        raise InputError(f"the export computes something else, and was not kept: {difference}")
    return difference


def _readme(fitted: Fitted, kind: str, exported: Exported) -> str:
    about = fitted.metadata
    name = Path(str(about["model"])).name
    lines = [f"# {name}, rotated ({kind})", *exported.lines]
    if exported.lost:
        lines.append(f"Learned, but not in this format: {exported.lost}.")
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
