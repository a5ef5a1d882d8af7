"""The vLLM plugin: our triples as vLLM attention backends."""
