"""Impls of latent attention (MLA)."""
