"""Orthogonal matrices: what they are, how they are made, applied, saved."""
