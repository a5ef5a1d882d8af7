"""Impls of this package."""
