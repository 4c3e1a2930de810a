"""Kernels for TPU, by `pl.pallas_call`; arguments are checked by the references beside."""
