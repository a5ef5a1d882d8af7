"""Triton code that writes the split-KV plan. Importing it needs Triton."""
