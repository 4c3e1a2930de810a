"""All ways to round weights, by name: one file and one record each."""

from __future__ import annotations

from qrot.quantize.method import WeightMethod
from qrot.records import collect

WEIGHT_METHODS: dict[str, WeightMethod] = collect("qrot.quantize", WeightMethod)
