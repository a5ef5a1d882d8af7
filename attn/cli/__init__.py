"""The ``attn`` command."""
