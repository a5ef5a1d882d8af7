"""Page tables, page lists and slots: kernels that write them, and their twins in torch."""
