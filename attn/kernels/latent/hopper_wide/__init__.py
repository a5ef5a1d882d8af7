"""The Hopper kernel of latent decodes with more than 16 query rows per request."""
