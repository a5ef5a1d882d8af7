"""Results as one HTML page that needs no network: frame, charts, and the page of a benchmark."""
