"""Fast kernels, each beside its plain-JAX reference."""
