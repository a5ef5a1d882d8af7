"""What the builders of FLASHINFER and FLASHINFER_MLA consist of."""
