"""Specs: dtypes, KV layouts, KV cache specs, capabilities, devices, models; data, no torch."""
