"""Checks of arguments: limits of a step, masks, tensors, and the checks of ``ATTN_DEBUG=1``."""
