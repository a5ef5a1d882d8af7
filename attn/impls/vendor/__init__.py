"""Impls of backends whose kernels are FlashInfer's or TensorRT-LLM's."""
