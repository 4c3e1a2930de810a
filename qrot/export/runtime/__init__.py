"""What travels with an exported checkpoint: PyTorch only, copied and not imported."""
