"""The page of a replay, its comparison with an older one, and the files that a run writes."""
