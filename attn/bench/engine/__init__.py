"""vLLM's engine, measured with our backends and with its own."""
