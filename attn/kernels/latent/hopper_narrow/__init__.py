"""The Hopper kernel of latent decodes by tiles of 16 query rows."""
