"""Kernels of the indexer, which lists the keys that sparse attention reads."""
