"""Hadamard matrices: how they are constructed, and how they are split into factors."""
