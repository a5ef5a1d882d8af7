"""Page tables, page lists and slots: torch twins and the kernels that write them."""
