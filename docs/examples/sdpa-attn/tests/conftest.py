"""The tests use the conformance kit of attn-backends."""

pytest_plugins = "attn.testing.plugin"
