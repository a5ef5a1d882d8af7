"""The Hopper kernel of sparse attention with many heads."""
