"""Dense attention: builders of TRITON_ATTN and TORCH_REF, their record, choice and tiles."""
