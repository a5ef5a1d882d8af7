"""Kernels of sparse latent attention."""
