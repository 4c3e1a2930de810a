"""Rotations that make language models easy to quantise."""

__version__ = "0.2.0"
