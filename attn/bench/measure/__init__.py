"""How a case is timed and judged."""
