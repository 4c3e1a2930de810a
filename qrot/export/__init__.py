"""Rotated and quantised models for PyTorch, each format in its file."""
