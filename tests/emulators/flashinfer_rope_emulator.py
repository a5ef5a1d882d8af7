"""FlashInfer's rotation and quantisation without a GPU.

The call is bound to a version's signature, checked like FlashInfer's launcher does, and computed in
fp32 like its kernel does.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from builders.vendor.flashinfer_parts import rope as flashinfer_rope
from builders.vendor.flashinfer_parts.rope import FlashInferRope
from tests.emulators.flashinfer_emulator import need
from tests.emulators.flashinfer_signatures import parsed, written

FUNCTION, MODULE = "mla_rope_quantize_fp8", "rope.py"
OLD, NEW = VERSIONS = ("0.6.14", "0.7.2.post1")
_BOTH = (
    "q_rope, k_rope, q_nope, k_nope, cos_sin_cache, pos_ids, is_neox=_, quantize_dtype=_, "
    "quant_scale_q=_, quant_scale_kv=_, q_rope_out=_, k_rope_out=_, q_nope_out=_, k_nope_out=_, "
    "enable_pdl=_"
)
SIGNATURES = {OLD: _BOTH, NEW: _BOTH}
E4M3 = torch.float8_e4m3fn

Mutation = Callable[[dict[str, Any]], None]


def installed_signature() -> str:
    """The installed FlashInfer's signature, read from its files, in this module's notation."""
    body = parsed(MODULE).body
    (node,) = (one for one in body if isinstance(one, ast.FunctionDef) and one.name == FUNCTION)
    return written(node.args)


def _turned(rows: Tensor, table: Tensor, positions: Tensor, is_neox: bool) -> Tensor:
    """Rotated rows, fp32 ``[T, heads, r]``."""
    x = rows.float()
    cos, sin = table[positions.long()][:, None].chunk(2, -1)
    first, second = x.chunk(2, -1) if is_neox else (x[..., 0::2], x[..., 1::2])
    parts = first * cos - second * sin, second * cos + first * sin
    return torch.cat(parts, -1) if is_neox else torch.stack(parts, -1).flatten(-2)


def _store(real: Tensor, factor: float, out: Tensor) -> None:
    wide = real.float() * torch.tensor(factor, dtype=torch.float32)
    out.copy_(wide.clamp(-448, 448).to(E4M3))


def make_function(version: str, mutation: Mutation | None = None) -> Callable[..., None]:
    """Make the ``mla_rope_quantize_fp8`` of a version."""
    signature = inspect.signature(eval(f"lambda {SIGNATURES[version].replace('=_', '=None')}: 0"))

    def call(*args: Any, **kwargs: Any) -> None:
        given = dict(signature.bind(*args, **kwargs).arguments)
        if mutation is not None:
            mutation(given)
        named = "q_rope", "k_rope", "q_nope", "k_nope"
        q_rope, k_rope, q_nope, k_nope = rows = [given[name] for name in named]
        outs = [given[f"{name}_out"] for name in named]
        table, positions = given["cos_sin_cache"], given["pos_ids"]
        need(given["quantize_dtype"] == E4M3, f"into {given['quantize_dtype']}")
        for x, out in zip(rows, outs, strict=True):
            need(x.stride(-1) == out.stride(-1) == 1, "rows are strided")
            need(x.shape == out.shape, f"{[*x.shape]} into {[*out.shape]}")
            need(x.dtype == q_rope.dtype and out.dtype == E4M3, "types")
            need(x.data_ptr() % 16 == out.data_ptr() % 16 == 0, "rows are not aligned")
        need(q_rope.dtype in (torch.float16, torch.bfloat16), f"inputs of {q_rope.dtype}")
        need(q_rope.dim() == q_nope.dim() == 3 and k_rope.dim() == k_nope.dim() == 2, "axes")
        need(len(q_rope) == len(q_nope) == len(k_rope) == len(k_nope) == len(positions), "rows")
        need(q_rope.shape[1] == q_nope.shape[1], "heads")
        need(q_rope.shape[2] == k_rope.shape[1] == table.shape[1], "rotary parts")
        need(q_nope.shape[2] == k_nope.shape[1], "latent parts")
        need(table.dtype == torch.float32 and table.is_contiguous(), "table")
        need(positions.dtype in (torch.int32, torch.int64), f"positions of {positions.dtype}")
        need(positions.is_contiguous(), "positions are strided")
        inside = (positions >= 0) & (positions < len(table))
        need(bool(inside.all()), "a position outside the table is read there")
        for name in ("quant_scale_q", "quant_scale_kv"):
            need(isinstance(given[name], float), f"{name} is {type(given[name]).__name__}")
        is_neox = given["is_neox"]
        q_real = _turned(q_rope, table, positions, is_neox)
        k_real = _turned(k_rope[:, None], table, positions, is_neox)[:, 0]
        q_factor, k_factor = given["quant_scale_q"], given["quant_scale_kv"]
        for real, factor, out in zip(
            (q_real, k_real, q_nope, k_nope),
            (q_factor, k_factor, q_factor, k_factor),
            outs,
            strict=True,
        ):
            _store(real, factor, out)

    return call


@contextmanager
def emulated(version: str = OLD, mutation: Mutation | None = None) -> Iterator[None]:
    """Put this module's function in FlashInfer's place."""
    found = FlashInferRope(version, make_function(version, mutation))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flashinfer_rope, "load_rope", lambda: found)
        yield
