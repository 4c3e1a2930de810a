"""Learning rotations: optimisers, objectives, the loop."""
