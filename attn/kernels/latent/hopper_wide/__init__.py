"""The Hopper kernel of latent decodes by tiles of 64 query rows."""
