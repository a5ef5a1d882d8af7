"""Hugging Face model families: which config fields attention depends on, and what they mean."""
