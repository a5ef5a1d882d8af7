"""Measurement of the tables of lines, a module for each table."""
