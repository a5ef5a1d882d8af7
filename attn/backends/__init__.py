"""The backend part of each triple: one module per stem."""
