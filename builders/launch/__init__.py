"""Launching Triton kernels: a launch as data, and launches that are prepared once."""
