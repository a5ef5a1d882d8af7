"""Kernels that write, clear, dequantise and merge rows."""
