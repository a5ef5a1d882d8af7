"""Backends of this package."""
