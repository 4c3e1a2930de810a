"""Many runs: sweeps of them, on this machine or on a cluster, and runs side by side."""
