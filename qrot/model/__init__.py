"""Models: configuration, parameters, forward pass, loading, fusing."""
