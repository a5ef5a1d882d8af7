"""``attn doctor``: what a machine has, which backend serves what, and a self-test."""
