"""Draft steps of speculative decoding."""
