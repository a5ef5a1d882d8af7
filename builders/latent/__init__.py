"""Latent attention (MLA): builders of TRITON_MLA and TORCH_REF_MLA, their record, choice and
tiles.
"""
