"""The attention backend SDPA_ATTN: torch's ``scaled_dot_product_attention``.

``attn`` imports this module to read ``ROW``, so the module imports nothing heavy.
"""

from attn.registry import BackendRow

ROW = BackendRow(
    "SDPA_ATTN",
    "sdpa_attn.backends.sdpa_attn:SdpaAttnBackend",
    # On a CPU it comes before TORCH_REF in the automatic choice.
    ranks={"cpu": 1},
)
