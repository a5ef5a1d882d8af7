"""Device functions that kernels of every family use."""
