"""adapter_config.json: what PEFT says of an adapter."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qrot.errors import InputError, located
from qrot.files.plain import read_json, short

# Settings that say nothing about merged weights.
_HARMLESS = (
    "auto_mapping",
    "inference_mode",
    "lora_dropout",
    "peft_version",
    "task_type",
    "layers_pattern",
    "runtime_config",
    "megatron_core",
    "eva_config",
    "qalora_group_size",
    "save_embedding_layers",
)
# How training began. Others (pissa, olora, corda, loftq) took part of the base model away, so that
# their adapters suit a base that is not the one they name.
_BEGINNINGS = (None, True, False, "gaussian", "eva", "orthogonal", "lora_ga")
_QUANTISED = re.compile(r"(?i)\b(bnb|awq|gptq|nf4|4bit|8bit|int4|int8|fp8|mlx)\b")


class AdapterConfig(BaseModel):
    """The settings of a LoRA or DoRA that its merged weights depend on, in PEFT's names.

    Attributes:
        r: rank.
        lora_alpha: updates are scaled by lora_alpha / r, or by lora_alpha / sqrt(r) with
            `use_rslora`.
        rank_pattern, alpha_pattern: ranks and alphas of modules whose names end like a key, which
            is a regular expression.
        use_dora: whether rows keep a length of their own (DoRA, arXiv 2402.09353).
        bias: which biases were trained beside it.
        target_modules: suffixes of names, a regular expression, or "all-linear".
        modules_to_save: that were trained whole.
        fan_in_fan_out: of layers that store weights [in, out], which no model of qrot's has.
        ensure_weight_tying: whether the head follows the embedding where a model ties them.
        base_model_name_or_path: the model that it was trained on.
    """

    model_config = ConfigDict(strict=True, extra="allow", frozen=True)

    peft_type: Literal["LORA"]
    r: int = Field(8, ge=1, le=1 << 16)
    lora_alpha: float = Field(8, allow_inf_nan=False)
    use_rslora: bool = False
    rank_pattern: dict[str, int] = {}
    alpha_pattern: dict[str, float] = {}
    use_dora: bool = False
    bias: Literal["none", "all", "lora_only"] = "none"
    lora_bias: bool = False
    target_modules: list[str] | str | None = None
    exclude_modules: list[str] | str | None = None
    layers_to_transform: list[int] | int | None = None
    modules_to_save: list[str] | None = None
    fan_in_fan_out: bool = False
    ensure_weight_tying: bool = False
    init_lora_weights: bool | str | None = True
    base_model_name_or_path: str | None = None
    revision: str | None = None

    def scaling(self, module: str) -> float:
        """What the update of a module is multiplied by."""
        rank = self.rank(module)
        alpha = _matching(self.alpha_pattern, module, self.lora_alpha)
        return alpha / (rank**0.5 if self.use_rslora else rank)

    def rank(self, module: str) -> int:
        """The rank of the update of a module."""
        return _matching(self.rank_pattern, module, self.r)

    def targets(self, module: str) -> bool:
        """Whether an update of this module was asked for."""
        wanted = self.target_modules
        if wanted is None:
            return False
        if wanted == "all-linear":
            return not module.endswith(("lm_head", "embed_tokens"))
        if _named(self.exclude_modules, module) or not _named(wanted, module):
            return False
        layers = self.layers_to_transform
        layer = re.search(r"\.layers\.(\d+)\.", f".{module}.")
        if layers is None or layer is None:
            return layers is None
        return int(layer[1]) in ([layers] if isinstance(layers, int) else layers)

    @property
    def quantised_base(self) -> bool:
        """Whether the name of the base model says that its weights were rounded."""
        words = re.sub(r"[-_/.]", " ", self.base_model_name_or_path or "")
        return bool(_QUANTISED.search(words)) or bool((self.model_extra or {}).get("loftq_config"))


def read_adapter_config(folder: Path) -> AdapterConfig:
    """Read adapter_config.json.

    Args:
        folder: of the adapter.

    Raises:
        InputError: in one sentence, for an adapter that is not LoRA or DoRA, and for settings that
            change what merging means and are not known here.
    """
    path = folder / "adapter_config.json"
    if not path.is_file():
        raise InputError(f"{folder}: no PEFT adapter, it has no adapter_config.json")
    raw = read_json(path)
    with located(path):
        return parse_adapter_config(raw)


def parse_adapter_config(raw: Any) -> AdapterConfig:
    """The same from the contents of the file; raises InputError as `read_adapter_config` does."""
    if not isinstance(raw, dict):
        raise InputError("it must hold a JSON object")
    if raw.get("peft_type") != "LORA":
        raise InputError(
            f"peft_type is {short(raw.get('peft_type'))}; qrot merges LORA (with or without DoRA)"
        )
    try:
        # Null is PEFT's word for a setting's default.
        config = AdapterConfig.model_validate({k: v for k, v in raw.items() if v is not None})
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise InputError(f"{key} must not be {short(first['input'])} ({first['msg']})") from error
    for key, value in (config.model_extra or {}).items():
        if value and key not in _HARMLESS:
            raise InputError(f"{key} is set to {short(value)}, which qrot cannot merge")
    if config.init_lora_weights not in _BEGINNINGS:
        raise InputError(
            f"init_lora_weights is {short(config.init_lora_weights)}: training took part of the"
            " base model away; save the adapter as a plain LoRA first (PEFT's"
            " path_initial_model_for_weight_conversion)"
        )
    for pattern in _patterns(config):
        try:
            re.compile(pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise InputError(f"{short(pattern)} is no regular expression ({error})") from error
    return config


def _patterns(config: AdapterConfig) -> Iterable[str]:
    yield from config.rank_pattern
    yield from config.alpha_pattern
    for names in (config.target_modules, config.exclude_modules):
        if isinstance(names, str):
            yield names


def _matching(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    found = (x for key, x in patterns.items() if re.match(rf"(.*\.)?({key})$", module))
    return next(found, default)


def _named(names: list[str] | str | None, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names or ())
