"""Kernels of dense attention."""
