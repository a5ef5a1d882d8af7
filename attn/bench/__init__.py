"""Benchmarks behind ``attn bench``."""
