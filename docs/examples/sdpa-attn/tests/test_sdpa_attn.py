"""SDPA_ATTN keeps every promise of its interface, and attn finds it."""

import pytest
from attn import AttentionBackendEnum

from sdpa_attn.backends.sdpa_attn import SdpaAttnBackend


def test_attn_finds_the_backend():
    assert AttentionBackendEnum["SDPA_ATTN"].get_class() is SdpaAttnBackend


@pytest.mark.attn_backend("SDPA_ATTN")
def test_conformance(attn_case):
    attn_case.check()
