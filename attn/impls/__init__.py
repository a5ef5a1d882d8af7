"""The impl part of each triple: one module per stem."""
