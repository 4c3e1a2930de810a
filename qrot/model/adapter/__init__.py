"""Adapters in PEFT's folders: low-rank updates of a model's weights, and how they are merged."""
