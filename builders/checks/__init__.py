"""Checks of what a builder is given: limits of a step, masks, tensors, and what ``ATTN_DEBUG=1``
adds.
"""
