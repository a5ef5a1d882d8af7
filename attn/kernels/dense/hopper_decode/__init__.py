"""The Hopper kernel of dense decode, verify and short extends."""
