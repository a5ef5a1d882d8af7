"""Triton code that writes the split-KV plan; its modules need Triton.

Read :mod:`builders.splitkv.device.plan` first: it holds the kernel.
"""
