"""Benchmark cases: layers, batches and their tensors."""
