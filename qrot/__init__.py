"""Rotations that make language models easy to quantise."""

__version__ = "0.1.0"
