"""What a run depends on, as dataclasses; `qrot.run.read` reads them from a YAML file."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Annotated, Any, Literal, Protocol, Union

from pydantic import Field, TypeAdapter

from qrot.calibrate.moments import Calibration
from qrot.errors import InputError
from qrot.evaluate.perplexity import Windows
from qrot.evaluate.zeroshot import ZeroShot
from qrot.files.plain import dump_yaml
from qrot.grid import OFF
from qrot.learn.settings import Learn
from qrot.model.adapter.source import Merge
from qrot.quantize.method import WeightMethod
from qrot.quantize.mixed import Mixed, check_scheme
from qrot.quantize.registry import WEIGHT_METHODS
from qrot.quantize.slicegpt import SliceGpt
from qrot.quantize.smoothquant import SmoothQuant
from qrot.records import check_count
from qrot.rotation.random import RotationSites
from qrot.run.limits import Gate
from qrot.run.thresholds import Refresh
from qrot.scheme import Scheme
from qrot.text import Data

_METHODS = (
    "full_precision",
    "no_rotation",
    "random_orthogonal",
    "random_hadamard",
    "random_hadamard_shift",
    "learned",
)
Dtype = Literal["float32", "bfloat16", "float16"]

if TYPE_CHECKING:

    class WeightSettings(Protocol):
        """The settings of a method that rounds weights: the class of one of `WEIGHT_METHODS`."""

        @property
        def method(self) -> str: ...  # noqa: D102

else:  # told apart by `method`
    WeightSettings = Annotated[
        Union[tuple(record.settings for record in WEIGHT_METHODS.values())],  # noqa: UP007
        Field(discriminator="method"),
    ]


@dataclass(frozen=True)
class RunConfig:
    """A run: a model put through some methods at one scheme, judged on one text.

    Attributes:
        model: see `qrot.model.io.load.load`; or a section with a base model and adapters that are
            merged into it while it is loaded.
        dtype: of the parameters.
        compute_dtype: of the arithmetic when judging.
        out: the run folder; runs/<name of the config file> where the file does not say.
        data: the texts to calibrate on and to judge by.
        other: a text of another kind to judge by as well, so that adapting to the calibration text
            shows; None for no such text.
        other_count: windows of it.
        scheme: the grids of weights, activations and cache.
        rotations: the sites that are rotated, by every method that rotates.
        methods: what is done to the network, without changing its function, before it is rounded:
            names in `qrot.run.methods`.
        saved: a file of another run for the method `saved`: rotations, or a whole network that
            was kept (`keep`); or rotations for `learn.start`, where that begins with such.
        allow_mismatch: whether that file may be one that was fitted to other weights than those of
            `model`; every row that it is in says so.
        seeds: of the random rotations.
        learn_seeds: of the learned ones, each learned on its own.
        learn: how they are learned.
        weights: what rounds the weights in every row, by its `method`, a name in
            `qrot.quantize.registry`, and its settings. For a method that makes up for the errors
            of rounding, rotations are learned with weights at 16 bits, where learn.weight_bits
            does not say otherwise.
        calibration: what all methods but those that learn see of the calibration text.
        slicegpt: of the method of that name.
        smoothquant: of the method of that name.
        mixed: bits of the weights by what rounding them costs, in every row, in place of one
            number for all; rotations are learned for scheme.weights.bits then. None for that
            number.
        evaluate: the windows of text to judge by.
        batch: windows that run at once.
        zeroshot: tasks to judge every row by as well; None for none.
        keep: the networks with rounded weights that stay in the run folder, for export, for
            generating text and for judging again: that of the best row (`network.safetensors`),
            of all rows (`networks/`), or of none.
        gate: limits on how far the kept network may be from full precision; a run that is above one
            of them fails. None for no gate.
        refresh: from when on `qrot refresh` of this run learns again for other weights.
        track: what is told of the steps of learning and of the rows: names in `qrot.run.track`.
    """

    __pydantic_config__ = {"extra": "forbid"}  # noqa: RUF012

    model: str | Merge = "smollm2"
    dtype: Dtype = "float32"
    compute_dtype: Dtype = "float32"
    out: str = "runs/run"
    data: Data = field(default_factory=Data)
    other: Data | None = None
    other_count: int = 8
    scheme: Scheme = field(default_factory=Scheme)
    rotations: RotationSites = field(default_factory=RotationSites)
    methods: tuple[str, ...] = _METHODS
    saved: str | None = None
    allow_mismatch: bool = False
    seeds: tuple[int, ...] = (0, 1, 2)
    learn_seeds: tuple[int, ...] = (0,)
    learn: Learn = field(default_factory=Learn)
    weights: WeightSettings = field(default_factory=WEIGHT_METHODS["rtn"].settings)
    calibration: Calibration = field(default_factory=Calibration)
    slicegpt: SliceGpt = field(default_factory=SliceGpt)
    smoothquant: SmoothQuant = field(default_factory=SmoothQuant)
    mixed: Mixed | None = None
    evaluate: Windows = field(default_factory=Windows)
    batch: int = 2
    zeroshot: ZeroShot | None = None
    keep: Literal["best", "all", "none"] = "best"
    gate: Gate | None = None
    refresh: Refresh = field(default_factory=Refresh)
    track: tuple[str, ...] = ()

    def __post_init__(self):
        for name in ("model", "out", "saved"):
            if getattr(self, name) == "":
                raise InputError(f"{name}: is empty")
        for name in ("methods", "seeds", "learn_seeds"):
            values = getattr(self, name)
            if not values or len(set(values)) < len(values):
                raise InputError(f"{name}: {list(values)} is empty or names one twice")
        if min(self.seeds + self.learn_seeds) < 0:
            raise InputError("seeds and learn_seeds: a seed is not negative")
        if self.mixed is not None:
            check_scheme(self.scheme)
        for name in ("batch", "other_count"):
            check_count(getattr(self, name), name)

    @property
    def weight_method(self) -> WeightMethod:
        """What rounds the weights."""
        return WEIGHT_METHODS[self.weights.method]

    @property
    def calibrates(self) -> bool:
        """Whether the weights are rounded by what they read of the calibration text."""
        return self.weight_method.text == "calibration" and self.scheme.rounds_weights

    @property
    def fitting_weight_bits(self) -> int:
        """Bits of the weights that rotations should be learned for."""
        compensates = self.weight_method.compensates and self.scheme.rounds_weights
        return OFF if compensates else self.scheme.weights.bits

    @property
    def trained_weight_bits(self) -> int:
        """Bits of the weights that rotations are learned for."""
        asked = self.learn.weight_bits
        return self.fitting_weight_bits if asked is None else asked


def resolved(config: RunConfig) -> dict[str, Any]:
    """The whole configuration as plain YAML values; `qrot.run.read.validate` reads it back."""
    return TypeAdapter(RunConfig).dump_python(config, mode="json")


def to_yaml(config: RunConfig) -> str:
    """The whole configuration as YAML."""
    return dump_yaml(resolved(config))
