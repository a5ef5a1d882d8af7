"""The SGLang plugin: our triples as SGLang attention backends."""
