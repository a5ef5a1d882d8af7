"""The Hopper kernel of dense decodes."""
