"""The Hopper kernel of sparse attention with few heads."""
