"""The Hopper kernel of latent decodes with at most 16 query rows per request."""
