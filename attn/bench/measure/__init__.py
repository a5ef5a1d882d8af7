"""Timing and judging of benchmark cases."""
