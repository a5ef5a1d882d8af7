"""Impls of dense attention."""
