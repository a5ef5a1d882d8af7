"""Adapters to serving engines and model libraries; no other package of this library knows them."""
