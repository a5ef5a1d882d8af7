"""Adapters to serving engines and model libraries; nothing else of this library knows them."""
