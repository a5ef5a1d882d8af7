"""The tables of each family."""
