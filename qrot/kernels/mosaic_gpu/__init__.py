"""Kernels for Hopper GPUs, by `plgpu.kernel`; arguments are checked by the references beside."""
