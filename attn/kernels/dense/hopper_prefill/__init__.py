"""The Hopper kernel of dense prefills."""
