"""Impls of sparse latent attention."""
