"""Compiling the kernels of layers before an engine serves them, without a GPU."""
