"""Metadata builders: a step's batch in, a backend's record out."""
