"""Triton kernels and their launchers. Nothing here is imported until a backend that uses it is."""
