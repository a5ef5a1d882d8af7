"""Parts of the builders of FLASHINFER and FLASHINFER_MLA."""
