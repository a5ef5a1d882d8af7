"""Sparse latent attention: builders of SPARSE_MLA and its indexer, their record, choice and
tiles.
"""
