"""Parts of the builders of TRTLLM_MHA and TRTLLM_MLA."""
