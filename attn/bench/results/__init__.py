"""Benchmark results: records, lines, tables and reports."""
