"""Builders of this package."""
