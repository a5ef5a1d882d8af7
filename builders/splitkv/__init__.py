"""The plan of split KV: which program attends which keys of which request."""
