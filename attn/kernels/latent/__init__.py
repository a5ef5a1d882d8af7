"""Kernels of latent attention (MLA)."""
