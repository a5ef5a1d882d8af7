"""Device code that writes the split-KV plan."""
