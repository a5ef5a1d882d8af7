"""The kernels of TRITON_ATTN in named variants, as data, and their launches for a GPU not present.

Builder, impl and operations make the launches on CPU tensors while they believe to be on the
target. Launches are recorded in place of being made. Nothing here knows a kernel's parameters.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from enum import StrEnum, unique
from types import SimpleNamespace
from typing import Any, Final
from unittest import mock

import torch

import attn.kernels.dense.launcher
import builders.dense.dequantised
import builders.dense.triton_attn
import builders.latent.triton_mla
import builders.splitkv.device.plan
import builders.splitkv.planner
from attn.impls.base import LayerScales
from attn.impls.dense.triton_attn import TritonAttentionImpl
from attn.impls.latent.triton_mla import TritonMLAImpl
from attn.kernels.cache.merge import merge_call
from attn.kernels.cache.write import rope_and_write_kv_call, write_kv_call
from attn.kernels.dense.hopper_prefill import dequantised as dequantised_launch
from attn.kernels.lang.stored import PTX, PTX_SM89
from attn.kernels.latent.launcher import LatentLauncher
from attn.kernels.latent.tensors import LatentLayer, LatentTensors
from attn.kernels.sparse.launcher import sparse_calls
from attn.kernels.sparse.layer import SparseLayer, SparseTensors
from attn.ops.latent_convert import convert_blocks, convert_rows, write_latent_rows
from attn.ops.topk_transform import transform_topk
from builders.batch import CommonAttentionMetadata
from builders.dense.triton_attn import TritonAttentionMetadataBuilder
from builders.latent.triton_mla import TritonMLAMetadataBuilder
from builders.launch.call import KernelCall, collected_calls
from builders.sparse.arguments import TopkLists
from builders.sparse.hopper_tiles import hopper_sparse_tile, usual_options
from builders.sparse.joint import joint_tile
from builders.sparse.tiles import SparseShape
from specs.attention import AttentionType
from specs.base import cdiv
from specs.cache_write import CacheTarget, Rotation
from specs.devices import KNOWN_DEVICES, GpuFacts
from specs.dtypes import CacheDType, DType
from specs.engine import DecodeKernel, EngineConfig, Kernels, PrefillKernel, SpeculativeConfig
from specs.kv_cache import (
    AnyKVCacheSpec,
    ChunkedLocalAttentionSpec,
    CrossAttentionSpec,
    EncoderOnlyAttentionSpec,
    FullAttentionSpec,
    MLAAttentionSpec,
    SlidingWindowMLASpec,
    SlidingWindowSpec,
)
from specs.layouts import KVOrder, KVPacking, KVViews, LatentKVLayout, latent_views
from specs.rows import RowFormat, latent_format_of
from specs.sparse_mla import IndexKind

TARGETS: Final = {80: "a100", 86: "a10", 90: "h100", 100: "b200", 120: "rtx-pro-6000"}
"""Compute capabilities to compile for, each with a device that has it."""
DEVICES: Final = {
    device.compute_capability.to_int(): device
    for device in reversed(KNOWN_DEVICES.values())
    if device.compute_capability is not None
}
"""A device of each known compute capability: the first in the list."""


@unique
class Kernel(StrEnum):
    """A kernel that is launched."""

    DECODE = "decode"
    PREFILL = "prefill"
    HOPPER_PREFILL = "hopper_prefill"
    HOPPER_DECODE = "hopper_decode"
    MLA_DECODE = "mla_decode"
    HOPPER_MLA = "hopper_mla"
    HOPPER_MLA_FOLD = "hopper_mla_fold"
    HOPPER_SPARSE = "hopper_sparse"
    PLAN = "plan"
    WRITE = "write"
    ROPE_WRITE = "rope_write"
    MLA_ROPE_WRITE = "mla_rope_write"
    MLA_PREFILL = "mla_prefill"
    MLA_EXPAND = "mla_expand"
    LATENT_CONVERT = "latent_convert"
    LATENT_WRITE = "latent_write"
    TOPK_TRANSFORM = "topk_transform"
    MERGE = "merge"
    DEQUANTISE = "dequantise"

    @property
    def decodes(self) -> bool:
        """Whether the kernel takes requests of few query tokens."""
        return self in (Kernel.DECODE, Kernel.HOPPER_DECODE)

    @property
    def attends(self) -> bool:
        """Whether the kernel reads keys and values tile by tile."""
        return self in (Kernel.DECODE, Kernel.PREFILL, Kernel.MLA_DECODE, Kernel.MLA_PREFILL)

    @property
    def is_of_hopper(self) -> bool:
        """Whether the kernel is written for Hopper, or serves such kernels."""
        return self.startswith("hopper") or self is Kernel.DEQUANTISE


@dataclass(frozen=True)
class Layer:
    """A layer, its cache and what a step asks of it."""

    heads: tuple[int, int, int] = (32, 8, 128)
    """Query heads, KV heads and head size."""
    head_size_v: int | None = None
    dtype: DType = DType.BFLOAT16
    cache: CacheDType = CacheDType.AUTO
    block_size: int = 16
    order: KVOrder = KVOrder.NHD
    attn_type: AttentionType = AttentionType.DECODER
    causal: bool | None = True
    """Whether attention is causal; None: a flag for each request."""
    window: int | None = None
    chunk: int | None = None
    lookback: int = 0
    sinks: bool = False
    soft_cap: float | None = None
    alibi: bool = False
    alibi_sqrt: bool = False
    ranges: bool = False
    clamps_ranges: bool = False
    rswa: int | None = None
    drafts: int = 0
    reqs: int = 2
    """Requests of a step."""
    batch_invariant: bool = False
    per_head_scales: bool = False
    lse: bool = False
    fp8_output: bool = False
    dequantised: bool = False
    """Prefills over a quantised cache dequantise it first."""
    neox: bool = True
    left_to_itself: bool = False
    """The engine leaves the choice of kernels to the backend."""
    rounds_queries: bool = False
    """Queries over an e4m3 latent cache are rounded to e4m3."""
    nope: int = 128
    """Columns of an expanded latent key that are not rotary."""
    expanded_v: int = 128
    """Columns of an expanded latent value."""
    target: CacheDType = CacheDType.AUTO
    """The format that latent rows are converted to."""
    whole: bool = False
    """A whole cache is converted, and not listed rows."""
    snaps: bool = False
    """Block scales become powers of two."""
    index_kind: IndexKind = IndexKind.PAGED
    """The kind of index that top-k lists become."""
    counts: bool = False
    """Listed entries come to the front of a list."""
    rows: int = 4096
    """Query tokens, each with a list; the lists of few tokens are cut into parts."""
    joined: int = 1
    """Neighbouring tokens that share a joint list."""
    max_len: int = 16384
    """Most tokens of a request, which sizes scratch."""

    @property
    def v_size(self) -> int:
        """Head size of values."""
        return self.head_size_v or self.heads[2]

    def spec(self) -> AnyKVCacheSpec:
        """The spec of its cache."""
        fields: dict[str, Any] = {
            "block_size": self.block_size,
            "num_kv_heads": self.heads[1],
            "head_size": self.heads[2],
            "head_size_v": self.head_size_v,
            "dtype": self.dtype,
            "cache_dtype": self.cache,
        }
        if self.attn_type is AttentionType.ENCODER_ONLY:
            return EncoderOnlyAttentionSpec(**fields, sliding_window=self.window)
        if self.attn_type is AttentionType.ENCODER_DECODER:
            return CrossAttentionSpec(**fields)
        if self.chunk is not None:
            local = {"attention_chunk_size": self.chunk, "chunk_lookback": self.lookback}
            return ChunkedLocalAttentionSpec(**fields, **local)
        if self.window is not None:
            return SlidingWindowSpec(**fields, sliding_window=self.window)
        return FullAttentionSpec(**fields)

    def engine(
        self, prefill_kernel: PrefillKernel, decode_kernel: DecodeKernel = DecodeKernel.AUTO
    ) -> EngineConfig:
        """Limits of an engine; those of the benchmark, but for the length."""
        drafts = self.drafts
        return EngineConfig(
            kernels=Kernels.own(prefill_kernel, decode_kernel),
            max_model_len=self.max_len,
            max_num_seqs=256,
            max_num_batched_tokens=8192,
            num_heads=self.heads[0],
            speculative=SpeculativeConfig(num_speculative_tokens=drafts) if drafts else None,
            batch_invariant=self.batch_invariant,
            fp8_mla_queries=self.rounds_queries,
            rswa_window=self.rswa,
            # Otherwise steps of long queries alone would not show the split-KV kernel's launch.
            exact_host_lengths=self.dequantised,
        )

    def impl(self) -> TritonAttentionImpl:
        """The layer's impl."""
        heads, kv_heads, size = self.heads
        return TritonAttentionImpl(
            heads,
            size,
            size**-0.5,
            kv_heads,
            [0.5] * heads if self.alibi else None,
            self.window,
            self.cache.value,
            self.soft_cap,
            self.attn_type,
            sinks=torch.zeros(heads) if self.sinks else None,
            use_alibi_sqrt=self.alibi_sqrt,
            attention_chunk_size=self.chunk,
            chunk_lookback=self.lookback if self.chunk else -1,
            head_size_v=self.head_size_v,
        )

    def scales(self) -> LayerScales:
        """Scales of its cache."""
        layer = LayerScales.of()
        if self.per_head_scales:
            layer._k_scale, layer._v_scale = torch.ones(self.heads[1]), torch.ones(self.heads[1])
        if self.clamps_ranges:
            layer.mm_prefix_clamp_sliding_window = True  # type: ignore[attr-defined]
        return layer


@dataclass(frozen=True)
class Variant:
    """One kernel compiled for one kind of layer."""

    kernel: Kernel
    of: str
    """The layer, in a few words."""
    layer: Layer = Layer()
    speed: bool = False
    """A shape of the speed table: it may not spill on sm_90."""
    tested: tuple[int, ...] = ()
    """Targets that ``make test`` compiles it for."""

    @property
    def name(self) -> str:
        """A unique name."""
        return f"{self.kernel.value} {self.of}"


def _attending(of: str, *tested: int, speed: bool = False, **fields: Any) -> list[Variant]:
    """Decode and prefill of one layer; prefill is tested if it is a shape of the speed table."""
    layer = Layer(**fields)
    return [
        Variant(Kernel.DECODE, of, layer, speed, tested),
        Variant(Kernel.PREFILL, of, layer, speed, tested if speed else ()),
    ]


def _only(kernel: Kernel, of: str, *tested: int, speed: bool = False, **fields: Any) -> Variant:
    return Variant(kernel, of, Layer(**fields), speed, tested)


def _latent(
    of: str, *tested: int, speed: bool = False, heads: int = 16, block_size: int = 64, **fields: Any
) -> Variant:
    sizes = {"heads": (heads, 1, 576), "head_size_v": 512, "block_size": block_size}
    return _only(Kernel.MLA_DECODE, of, *tested, speed=speed, **sizes, **fields)


def _of_latents(kernel: Kernel, of: str, *tested: int, heads: int = 16, **fields: Any) -> Variant:
    sizes = {"heads": (heads, 1, 576), "head_size_v": 512, "block_size": 64}
    return _only(kernel, of, *tested, **sizes, **fields)


_D, _P = Kernel.DECODE, Kernel.PREFILL
_FP8, _E5M2 = CacheDType.FP8_E4M3, CacheDType.FP8_E5M2
_INT8, _INT4 = CacheDType.INT8_PER_TOKEN_HEAD, CacheDType.INT4_PER_TOKEN_HEAD
_FP8_INLINE = CacheDType.FP8_PER_TOKEN_HEAD
_DS_MLA = CacheDType.FP8_DS_MLA
_ENCODER, _CROSS = AttentionType.ENCODER_ONLY, AttentionType.ENCODER_DECODER

VARIANTS: Final = (
    # The shapes of the speed table.
    *_attending("32/8/128", 80, 90, 100, 120, speed=True),
    *_attending("64/8/64", 90, speed=True, heads=(64, 8, 64)),
    *_attending("16/8/256", 86, 90, speed=True, heads=(16, 8, 256)),
    _only(_D, "64/8/64 window sinks", 90, speed=True, heads=(64, 8, 64), window=128, sinks=True),
    _only(_D, "8/1/128", 90, speed=True, heads=(8, 1, 128)),
    _only(_D, "32/32/128", 90, speed=True, heads=(32, 32, 128)),
    _only(_D, "fp8", 80, 90, 100, 120, speed=True, cache=_FP8),
    _only(_D, "verify 4", 90, speed=True, drafts=3),
    _only(_D, "verify 8", 90, speed=True, drafts=7),
    _only(_P, "window 1024", 90, speed=True, window=1024),
    # Types and caches.
    _only(_P, "fp8", cache=_FP8),
    *_attending("fp16", dtype=DType.FLOAT16),
    *_attending("fp32", 80, dtype=DType.FLOAT32),
    _only(_D, "fp16 cache", cache=CacheDType.FLOAT16),
    *_attending("e5m2", cache=_E5M2),
    *_attending("int8 inline", 90, cache=_INT8),
    *_attending("int4 inline", 90, cache=_INT4),
    *_attending("fp8 inline", 90, cache=_FP8_INLINE),
    *_attending("fp8 scales per head", cache=_FP8, per_head_scales=True),
    # Head sizes and groups.
    *_attending("32/8/40", heads=(32, 8, 40)),
    *_attending("32/8/192 values 128", heads=(32, 8, 192), head_size_v=128),
    *_attending("16/8/512", 120, heads=(16, 8, 512)),
    *_attending("16/8/512 fp32", heads=(16, 8, 512), dtype=DType.FLOAT32),
    _only(_D, "16/8/256 fp8", heads=(16, 8, 256), cache=_FP8),
    _only(_D, "128/1/128", heads=(128, 1, 128)),
    _only(_D, "128/1/512", heads=(128, 1, 512)),
    _only(_D, "8/1/128 verify 8", 90, heads=(8, 1, 128), drafts=7),
    _only(_D, "64/8/64 verify 8", heads=(64, 8, 64), drafts=7),
    _only(_D, "64/8/256 verify 8", heads=(64, 8, 256), drafts=7),
    _only(_D, "64/8/512 verify 8", heads=(64, 8, 512), drafts=7),
    # What a layer or a step asks.
    *_attending("soft cap window", soft_cap=30.0, window=128),
    _only(_D, "alibi", alibi=True),
    _only(_P, "alibi square root", alibi=True, alibi_sqrt=True),
    *_attending("chunks lookback", chunk=8192, lookback=1),
    _only(_D, "ranges", ranges=True),
    *_attending("ranges clamped to a window", ranges=True, clamps_ranges=True, window=128),
    *_attending("rswa", rswa=128),
    *_attending("causal per request", causal=None),
    *_attending("not causal window", causal=False, window=128),
    *_attending("sinks lse", sinks=True, lse=True),
    *_attending("fp8 output", fp8_output=True),
    # Planned for the Hopper kernel, and left to the portable kernel because of the tensors.
    _only(_D, "8/1/128 alibi planned", 90, heads=(8, 1, 128), alibi=True, left_to_itself=True),
    _only(_D, "16/8/256 alibi planned", heads=(16, 8, 256), alibi=True, left_to_itself=True),
    _only(_D, "verify 4 alibi planned", drafts=3, alibi=True, left_to_itself=True),
    _only(_D, "cross attention", attn_type=_CROSS, causal=False),
    _only(_D, "invariant", 90, batch_invariant=True),
    _only(_D, "64/8/512 invariant", heads=(64, 8, 512), batch_invariant=True),
    _only(
        _D, "verify 8 fp8 sinks window lse", drafts=7, cache=_FP8, sinks=True, window=128, lse=True
    ),
    _only(_P, "encoder", attn_type=_ENCODER, causal=False),
    _only(_P, "encoder window", attn_type=_ENCODER, causal=False, window=128),
    # Layouts.
    *_attending("blocks of 48", block_size=48),
    _only(_D, "blocks of 528", block_size=528),
    _only(_D, "HND", order=KVOrder.HND),
    # The other kernels.
    _only(Kernel.PLAN, "32/8/128", 90),
    _only(Kernel.PLAN, "window verify 8", window=128, drafts=7),
    _only(Kernel.PLAN, "chunks", chunk=8192, lookback=1),
    _only(Kernel.PLAN, "8/1/128", heads=(8, 1, 128)),
    _only(Kernel.PLAN, "100 requests", 90, reqs=100),
    _only(Kernel.PLAN, "8/1/128 100 requests", heads=(8, 1, 128), reqs=100),
    *(_only(Kernel.WRITE, cache.value, cache=cache) for cache in (CacheDType.AUTO, _E5M2)),
    *(_only(Kernel.WRITE, cache.value, cache=cache) for cache in (_INT8, _FP8_INLINE)),
    _only(Kernel.WRITE, "fp8", cache=_FP8),
    _only(Kernel.WRITE, "int4", 80, cache=_INT4),
    _only(Kernel.ROPE_WRITE, "auto"),
    _only(Kernel.ROPE_WRITE, "fp8", 90, cache=_FP8),
    _only(Kernel.ROPE_WRITE, "int4 interleaved", cache=_INT4, neox=False),
    _only(Kernel.MERGE, "lse", lse=True),
    _only(Kernel.MERGE, "fp8 output", 80, fp8_output=True),
)

MLA_VARIANTS: Final = (
    _latent("16 heads", 90, 120, speed=True),
    _latent("128 heads", 86, 90, speed=True, heads=128),
    _latent("16 heads verify 4", 90, speed=True, drafts=3),
    _latent("16 heads fp8", 90, speed=True, cache=_FP8),
    _latent("128 heads fp8", heads=128, cache=_FP8),
    _latent("20 heads fp16 blocks of 48", heads=20, dtype=DType.FLOAT16, block_size=48),
    _latent("16 heads fp32", dtype=DType.FLOAT32),
    _latent("16 heads fp16 cache", cache=CacheDType.FLOAT16),
    _latent("16 heads window", window=1024),
    _latent("128 heads verify 4 window", heads=128, drafts=3, window=1024),
    _of_latents(Kernel.MLA_ROPE_WRITE, "16 heads"),
    _of_latents(
        Kernel.MLA_ROPE_WRITE, "128 heads fp8 interleaved", 90, heads=128, cache=_FP8, neox=False
    ),
    _of_latents(Kernel.MLA_PREFILL, "new tokens"),
    # Queries attend a chunk of context, which is not causal.
    _of_latents(Kernel.MLA_PREFILL, "context", causal=False),
    _of_latents(Kernel.MLA_PREFILL, "context window", 90, causal=False, window=1024),
    _of_latents(Kernel.MLA_EXPAND, "context", 90, causal=False),
    _of_latents(Kernel.MLA_EXPAND, "context fp8", 90, causal=False, cache=_FP8),
    # Rows move from one format and place to another.
    _of_latents(Kernel.LATENT_WRITE, "656", 80, 90, speed=True, cache=_DS_MLA),
    _of_latents(
        *(Kernel.LATENT_CONVERT, "576 to 656 whole", 90),
        **{"speed": True, "cache": _FP8, "target": _DS_MLA, "whole": True},
    ),
    _of_latents(Kernel.LATENT_CONVERT, "576 to 656 snaps", cache=_FP8, target=_DS_MLA, snaps=True),
    _of_latents(Kernel.LATENT_CONVERT, "576 to bf16", speed=True, cache=_FP8),
    _of_latents(Kernel.LATENT_CONVERT, "656 to bf16", 80, 90, 100, 120, speed=True, cache=_DS_MLA),
    _of_latents(Kernel.LATENT_CONVERT, "bf16 to 656", speed=True, target=_DS_MLA),
    _of_latents(Kernel.LATENT_CONVERT, "bf16 to bf16", speed=True),
    _of_latents(Kernel.LATENT_CONVERT, "656 to 656", cache=_DS_MLA, target=_DS_MLA),
    # Lists of 2048 tokens.
    _of_latents(Kernel.TOPK_TRANSFORM, "slots", 90, speed=True),
    _of_latents(Kernel.TOPK_TRANSFORM, "slots to the front", 80, speed=True, counts=True),
    _of_latents(Kernel.TOPK_TRANSFORM, "contexts", index_kind=IndexKind.RAGGED),
    _of_latents(Kernel.TOPK_TRANSFORM, "gathered", speed=True, index_kind=IndexKind.GATHERED),
)

_H, _HD, _HL = Kernel.HOPPER_PREFILL, Kernel.HOPPER_DECODE, Kernel.HOPPER_MLA
_HS = Kernel.HOPPER_SPARSE
_INVARIANT: Final[dict[str, Any]] = {"batch_invariant": True}

INVARIANT_VARIANTS: Final = (
    # All kernels of a layer must make the same bits.
    *_attending("32/8/128", 90, speed=True, **_INVARIANT),
    *_attending("64/8/64", speed=True, heads=(64, 8, 64), **_INVARIANT),
    # Decodes of Hopper run by its own kernel; the portable one has two registers too few.
    _only(_D, "16/8/256", 90, heads=(16, 8, 256), **_INVARIANT),
    _only(_P, "16/8/256", 90, speed=True, heads=(16, 8, 256), **_INVARIANT),
    _only(_D, "cap sinks", 90, soft_cap=30.0, sinks=True, **_INVARIANT),
    _only(_P, "cap sinks", 90, soft_cap=30.0, sinks=True, **_INVARIANT),
    *_attending("alibi", alibi=True, **_INVARIANT),
    *_attending("window 1024", window=1024, **_INVARIANT),
    _only(_P, "16/8/192", heads=(16, 8, 192), **_INVARIANT),
    _only(_P, "8/1/128 fp16", heads=(8, 1, 128), dtype=DType.FLOAT16, **_INVARIANT),
    _only(
        _P, "16/8/256 soft cap window", heads=(16, 8, 256), soft_cap=30.0, window=128, **_INVARIANT
    ),
    _only(_P, "64/8/64 window sinks", heads=(64, 8, 64), window=128, sinks=True, **_INVARIANT),
    _only(_D, "verify 4", drafts=3, **_INVARIANT),
    # Caches of 8 bits. Prompts at head size 128 spill outside of the loops over keys; with a factor
    # for each key they spill inside too.
    *_attending("fp8 32/8/128", 90, cache=_FP8, **_INVARIANT),
    *_attending("fp8 64/8/64", speed=True, heads=(64, 8, 64), cache=_FP8, **_INVARIANT),
    _only(_P, "fp8 16/8/256", heads=(16, 8, 256), cache=_FP8, **_INVARIANT),
    _only(_P, "fp8 window 1024", window=1024, cache=_FP8, **_INVARIANT),
    _only(_P, "fp8 verify 8", drafts=7, cache=_FP8, **_INVARIANT),
    *_attending("e5m2 32/8/128", cache=_E5M2, **_INVARIANT),
    *_attending("int8 32/8/128", 90, cache=_INT8, **_INVARIANT),
    _only(_P, "int8 64/8/64", 90, heads=(64, 8, 64), cache=_INT8, **_INVARIANT),
    _only(_HD, "32/8/128", 90, speed=True, **_INVARIANT),
    _only(_HD, "8/1/128 fp16", speed=True, heads=(8, 1, 128), dtype=DType.FLOAT16, **_INVARIANT),
    _only(_HD, "verify 8", 90, speed=True, drafts=7, **_INVARIANT),
    _only(_HD, "verify 4 soft cap window", drafts=3, soft_cap=30.0, window=1024, **_INVARIANT),
    _only(_HD, "64/8/64", speed=True, heads=(64, 8, 64), **_INVARIANT),
    _only(_HD, "16/8/256", speed=True, heads=(16, 8, 256), **_INVARIANT),
    _only(_HD, "verify 4", speed=True, drafts=3, **_INVARIANT),
    _only(_HD, "64/8/64 window sinks", heads=(64, 8, 64), window=1024, sinks=True, **_INVARIANT),
    _only(_HD, "fp8", 90, speed=True, cache=_FP8, **_INVARIANT),
    _only(_HD, "fp8 fp16 soft cap", dtype=DType.FLOAT16, cache=_FP8, soft_cap=30.0, **_INVARIANT),
    _only(_H, "32/8/128", 90, speed=True, **_INVARIANT),
    _only(_H, "64/8/64", speed=True, heads=(64, 8, 64), **_INVARIANT),
    _only(_H, "32/32/96", speed=True, heads=(32, 32, 96), **_INVARIANT),
    _only(_H, "16/8/192", speed=True, heads=(16, 8, 192), **_INVARIANT),
    _only(_H, "16/8/256", 90, speed=True, heads=(16, 8, 256), **_INVARIANT),
    _only(_H, "window 1024", speed=True, window=1024, **_INVARIANT),
    _only(_H, "64/8/64 window sinks", heads=(64, 8, 64), window=128, sinks=True, **_INVARIANT),
    _only(_H, "cap sinks", soft_cap=30.0, sinks=True, **_INVARIANT),
    _only(
        _H, "16/8/256 soft cap window", heads=(16, 8, 256), soft_cap=30.0, window=1024, **_INVARIANT
    ),
    _only(
        _H, "8/1/128 fp16 verify 8", heads=(8, 1, 128), dtype=DType.FLOAT16, drafts=7, **_INVARIANT
    ),
    _only(_H, "chunks lookback", chunk=8192, lookback=1, **_INVARIANT),
    _only(_H, "ranges", ranges=True, **_INVARIANT),
    _only(_H, "fp8 output lse", fp8_output=True, lse=True, **_INVARIANT),
    _only(_H, "32/8/160", heads=(32, 8, 160), **_INVARIANT),
)

_ROUNDED: Final[dict[str, Any]] = {"cache": _FP8, "rounds_queries": True}
_EXPANDED: Final[dict[str, Any]] = {"heads": (16, 16, 192), "head_size_v": 128}

HOPPER_VARIANTS: Final = (
    # The shapes of the speed table.
    _only(_H, "32/8/128", 90, speed=True),
    _only(_H, "64/8/64", 90, speed=True, heads=(64, 8, 64)),
    _only(_H, "16/8/256", 90, speed=True, heads=(16, 8, 256)),
    _only(_H, "window 1024", 90, speed=True, window=1024),
    # Types, head sizes, groups.
    _only(_H, "fp16", dtype=DType.FLOAT16),
    _only(_H, "32/8/80", speed=True, heads=(32, 8, 80)),
    _only(_H, "32/32/96", speed=True, heads=(32, 32, 96)),
    _only(_H, "32/8/160", speed=True, heads=(32, 8, 160)),
    _only(_H, "64/8/192", 90, speed=True, heads=(64, 8, 192)),
    _only(_H, "32/8/96 soft cap window", heads=(32, 8, 96), soft_cap=30.0, window=128),
    _only(_H, "16/8/192 sinks lse", heads=(16, 8, 192), sinks=True, lse=True),
    _only(_H, "16/8/192 ranges", heads=(16, 8, 192), ranges=True),
    _only(_H, "32/32/128", heads=(32, 32, 128)),
    _only(_H, "28/4/128", heads=(28, 4, 128)),
    _only(_H, "128/1/128", heads=(128, 1, 128)),
    # What a layer or a step asks.
    _only(_H, "64/8/64 window sinks", heads=(64, 8, 64), window=128, sinks=True),
    _only(_H, "soft cap window", soft_cap=30.0, window=128),
    _only(_H, "16/8/256 soft cap window", heads=(16, 8, 256), soft_cap=30.0, window=1024),
    _only(_H, "chunks lookback", chunk=8192, lookback=1),
    _only(_H, "causal per request", causal=None),
    _only(_H, "ranges clamped to a window", ranges=True, clamps_ranges=True, window=128),
    _only(_H, "ranges", ranges=True),
    _only(_H, "not causal window", causal=False, window=128),
    _only(_H, "sinks lse", sinks=True, lse=True),
    _only(_H, "fp8 output", fp8_output=True),
    _only(_H, "cross attention", attn_type=_CROSS, causal=False),
    # Latent attention with expanded heads, over dense keys and over pages.
    _only(
        *(_H, "16/16/192 values 128", 90),
        **{"speed": True, "attn_type": _ENCODER, "causal": False, **_EXPANDED},
    ),
    _only(_H, "16/16/192 values 128 pages", speed=True, **_EXPANDED, lse=True),
    # Caches of 8 bits.
    _only(_H, "fp8 32/8/128", 90, cache=_FP8, speed=True),
    _only(_H, "fp8 64/8/64", cache=_FP8, heads=(64, 8, 64)),
    _only(_H, "fp8 dequantised", 90, cache=_FP8, speed=True, dequantised=True),
    _only(
        _H,
        "fp8 dequantised 64/8/64 window sinks",
        **{"cache": _FP8, "heads": (64, 8, 64), "window": 128, "sinks": True},
        dequantised=True,
        speed=True,
    ),
    _only(_H, "fp8 dequantised 32/8/80", cache=_FP8, heads=(32, 8, 80), dequantised=True),
    _only(_H, "fp8 dequantised 16/8/192", cache=_FP8, heads=(16, 8, 192), dequantised=True),
    _only(
        _H,
        "fp8 dequantised 16/8/256 sinks",
        cache=_FP8,
        heads=(16, 8, 256),
        sinks=True,
        dequantised=True,
    ),
    _only(Kernel.DEQUANTISE, "fp8", 90, cache=_FP8, speed=True, dequantised=True),
    _only(
        Kernel.DEQUANTISE,
        "e5m2 16/2/80",
        cache=CacheDType.FP8_E5M2,
        heads=(16, 2, 80),
        dequantised=True,
    ),
    _only(_H, "fp8 16/8/256", cache=_FP8, heads=(16, 8, 256)),
    _only(_H, "fp8 fp16", cache=_FP8, dtype=DType.FLOAT16),
    _only(_H, "e5m2 window", cache=_E5M2, window=1024),
    # Layouts.
    _only(_H, "blocks of 48", block_size=48),
    _only(_H, "blocks of 528", block_size=528),
    _only(_H, "blocks of 256", block_size=256),
    _only(_H, "HND", order=KVOrder.HND),
    # Split KV: the shapes of the speed table.
    _only(_HD, "32/8/128", 90, speed=True),
    _only(_HD, "64/8/64", speed=True, heads=(64, 8, 64)),
    _only(_HD, "16/8/256", 90, speed=True, heads=(16, 8, 256)),
    _only(_HD, "8/1/128", 90, speed=True, heads=(8, 1, 128)),
    _only(_HD, "32/32/128", speed=True, heads=(32, 32, 128)),
    _only(_HD, "8/1/192", speed=True, heads=(8, 1, 192)),
    _only(_HD, "12/2/128", speed=True, heads=(12, 2, 128)),
    _only(_HD, "24/8/128", speed=True, heads=(24, 8, 128)),
    _only(_HD, "96/8/128", speed=True, heads=(96, 8, 128)),
    _only(_HD, "32/8/80", speed=True, heads=(32, 8, 80)),
    _only(_HD, "32/8/160", speed=True, heads=(32, 8, 160)),
    _only(_HD, "32/8/96 verify 8", speed=True, heads=(32, 8, 96), drafts=7),
    _only(_HD, "32/8/192 fp8", speed=True, heads=(32, 8, 192), cache=_FP8),
    _only(_HD, "verify 4", speed=True, drafts=3),
    _only(_HD, "verify 8", 90, speed=True, drafts=7),
    _only(_HD, "64/8/64 window sinks", 90, speed=True, heads=(64, 8, 64), window=128, sinks=True),
    _only(_HD, "fp8", 90, speed=True, cache=_FP8),
    _only(_HD, "fp8 verify 4", cache=_FP8, drafts=3),
    _only(_HD, "16/8/256 fp8", heads=(16, 8, 256), cache=_FP8),
    _only(_HD, "fp8 fp16 scales per head", dtype=DType.FLOAT16, cache=_FP8, per_head_scales=True),
    _only(_HD, "fp8 soft cap window sinks", cache=_FP8, soft_cap=30.0, window=128, sinks=True),
    # Types and groups; what a layer or a step asks.
    _only(_HD, "fp16", dtype=DType.FLOAT16),
    _only(_HD, "28/4/128", heads=(28, 4, 128)),
    _only(_HD, "128/1/128", heads=(128, 1, 128)),
    _only(_HD, "64/8/64 verify 8", heads=(64, 8, 64), drafts=7),
    _only(_HD, "verify 8 soft cap window", drafts=7, soft_cap=30.0, window=1024),
    _only(_HD, "verify 8 sinks ranges", drafts=7, sinks=True, ranges=True),
    _only(_HD, "16/8/256 verify 8", heads=(16, 8, 256), drafts=7),
    _only(_HD, "soft cap window", soft_cap=30.0, window=128),
    _only(_HD, "16/8/256 soft cap window", heads=(16, 8, 256), soft_cap=30.0, window=1024),
    _only(_HD, "chunks lookback", chunk=8192, lookback=1),
    _only(_HD, "causal per request", causal=None),
    _only(_HD, "ranges clamped to a window", ranges=True, clamps_ranges=True, window=128),
    _only(_HD, "ranges", ranges=True),
    _only(_HD, "not causal window", causal=False, window=128),
    _only(_HD, "sinks lse", sinks=True, lse=True),
    _only(_HD, "fp8 output", fp8_output=True),
    _only(_HD, "cross attention", attn_type=_CROSS, causal=False),
    # Layouts.
    _only(_HD, "blocks of 48", block_size=48),
    _only(_HD, "blocks of 528", block_size=528),
    _only(_HD, "blocks of 256", block_size=256),
    _only(_HD, "HND", order=KVOrder.HND),
    # Latent attention. With 16 heads one warp's rows are used; 128 heads are two tiles.
    _only(_HL, "16 heads", 90, speed=True, heads=(16, 1, 576), block_size=64),
    # Beyond 128k keys there are so many segment groups that they are folded in pieces.
    _only(_HL, "16 heads 1M keys", 90, heads=(16, 1, 576), block_size=64, max_len=1 << 20),
    _only(_HL, "128 heads", 90, speed=True, heads=(128, 1, 576), block_size=64),
    _of_latents(_HL, "12 heads", speed=True, heads=12),
    _of_latents(_HL, "24 heads", speed=True, heads=24),
    _of_latents(_HL, "64 heads", speed=True, heads=64),
    _of_latents(_HL, "96 heads", speed=True, heads=96),
    _of_latents(_HL, "16 heads verify 4", speed=True, drafts=3),
    _of_latents(_HL, "16 heads verify 8", speed=True, drafts=7),
    _of_latents(_HL, "128 heads verify 2", speed=True, heads=128, drafts=1),
    _of_latents(_HL, "128 heads verify 4", speed=True, heads=128, drafts=3),
    # Triton 3.9 keeps the thread's number on the stack, and reads it once per work item.
    _only(_HL, "16 heads pages of 16", speed=True, heads=(16, 1, 576)),
    _only(_HL, "64 heads pages of 16", heads=(64, 1, 576)),
    _only(_HL, "128 heads pages of 32", speed=True, heads=(128, 1, 576), block_size=32),
    _only(_HL, "128 heads pages of 128", speed=True, heads=(128, 1, 576), block_size=128),
    _only(_HL, "20 heads", heads=(20, 1, 576)),
    _only(_HL, "20 heads verify 4", heads=(20, 1, 576), drafts=3),
    _only(_HL, "128 heads fp16", heads=(128, 1, 576), block_size=64, dtype=DType.FLOAT16),
    _only(Kernel.HOPPER_MLA_FOLD, "128 heads", 90, speed=True, heads=(128, 1, 576), block_size=64),
    _only(_HL, "16 heads fp8", 90, speed=True, heads=(16, 1, 576), block_size=64, cache=_FP8),
    _only(_HL, "128 heads fp8", 90, speed=True, heads=(128, 1, 576), block_size=64, cache=_FP8),
    _only(_HL, "64 heads fp8 pages of 16", heads=(64, 1, 576), cache=_FP8),
    _of_latents(_HL, "128 heads fp8 rounded queries", 90, speed=True, heads=128, **_ROUNDED),
    _of_latents(_HL, "64 heads fp8 rounded queries", speed=True, heads=64, **_ROUNDED),
    _only(_HL, "20 heads fp8 fp16", heads=(20, 1, 576), dtype=DType.FLOAT16, cache=_FP8, drafts=3),
    _only(
        *(_HL, "20 heads fp8 fp16 invariant"),
        **{"heads": (20, 1, 576), "dtype": DType.FLOAT16, "cache": _FP8, "drafts": 3},
        batch_invariant=True,
    ),
    # Lists of rows.
    _of_latents(_HS, "128 heads", 90, speed=True, heads=128),
    _of_latents(_HS, "64 heads", heads=64),
    _of_latents(_HS, "128 heads 8 rows", heads=128, rows=8),
    _of_latents(_HS, "40 heads sinks fp16", heads=40, sinks=True, dtype=DType.FLOAT16),
    _of_latents(_HS, "128 heads 656", 90, speed=True, heads=128, cache=_DS_MLA),
    _of_latents(_HS, "64 heads 656", speed=True, heads=64, cache=_DS_MLA),
    _of_latents(_HS, "96 heads 656", speed=True, heads=96, cache=_DS_MLA),
    _of_latents(_HS, "128 heads 656 8 rows", heads=128, cache=_DS_MLA, rows=8),
    _of_latents(_HS, "128 heads 656 sinks", heads=128, cache=_DS_MLA, sinks=True),
    # Programs share the lists by tiles.
    _of_latents(_HS, "128 heads 100 rows", heads=128, rows=100),
    _of_latents(_HS, "128 heads 656 100 rows", heads=128, cache=_DS_MLA, rows=100),
    # Few heads.
    _of_latents(_HS, "16 heads", 90, speed=True, heads=16),
    _of_latents(_HS, "16 heads 656", 90, speed=True, heads=16, cache=_DS_MLA),
    _of_latents(_HS, "16 heads 656 8 rows", speed=True, heads=16, cache=_DS_MLA, rows=8),
    _of_latents(_HS, "8 heads 656", speed=True, heads=8, cache=_DS_MLA),
    _of_latents(_HS, "12 heads 656", speed=True, heads=12, cache=_DS_MLA),
    _of_latents(_HS, "24 heads 656", speed=True, heads=24, cache=_DS_MLA),
    _of_latents(_HS, "20 heads sinks fp16", heads=20, sinks=True, dtype=DType.FLOAT16),
    _of_latents(_HS, "16 heads 576", 90, speed=True, heads=16, cache=_FP8),
    # Tokens of prompts that attend together.
    _of_latents(_HS, "16 heads joint", 90, speed=True, heads=16, joined=4),
    _of_latents(_HS, "8 heads joint", heads=8, joined=8),
    _of_latents(_HS, "16 heads 656 joint", 90, speed=True, heads=16, cache=_DS_MLA, joined=4),
    _of_latents(_HS, "8 heads 656 joint", heads=8, cache=_DS_MLA, joined=8),
)


def call_of(variant: Variant, target: int) -> KernelCall:
    """The launch that the target would see."""
    layer = variant.layer
    if variant.kernel in (Kernel.WRITE, Kernel.ROPE_WRITE):
        return _write_call(layer, variant.kernel is Kernel.ROPE_WRITE, target >= 89)
    if variant.kernel is Kernel.MLA_ROPE_WRITE:
        return _latent_write_call(layer, target >= 89)
    if variant.kernel is Kernel.MERGE:
        return _merge_call(layer, target >= 89)
    if variant.kernel in (Kernel.LATENT_CONVERT, Kernel.LATENT_WRITE):
        return _latent_convert_call(layer, variant.kernel, target >= 89)
    if variant.kernel is Kernel.TOPK_TRANSFORM:
        return _topk_call(layer)
    if variant.kernel is Kernel.HOPPER_SPARSE:
        return _hopper_sparse_call(layer)
    with pretending(target):
        if variant.kernel is Kernel.PLAN:
            return _plan_call(layer)
        if variant.kernel is Kernel.MLA_DECODE:
            return _latent_call(layer)
        if variant.kernel in (Kernel.MLA_PREFILL, Kernel.MLA_EXPAND):
            return _expanded_call(layer, variant.kernel, DEVICES[target].facts)
        if variant.kernel in (Kernel.HOPPER_MLA, Kernel.HOPPER_MLA_FOLD):
            return _hopper_latent_call(layer, variant.kernel)
        return _attention_call(layer, variant.kernel)


@contextmanager
def pretending(target: int) -> Iterator[None]:
    """CPU tensors are on the target, as far as tiles and instructions go."""
    device = DEVICES[target]
    form = (PTX_SM89, True) if target >= 89 else (PTX, False)
    with (
        mock.patch.object(builders.dense.triton_attn, "device_facts", return_value=device.facts),
        mock.patch.object(builders.latent.triton_mla, "device_facts", return_value=device.facts),
        mock.patch.object(attn.kernels.dense.launcher, "decode_form", return_value=form),
        mock.patch.object(attn.kernels.latent.launcher, "decode_form", return_value=form),
        mock.patch.object(dequantised_launch, "decode_form", return_value=form),
    ):
        yield


def _batch(layer: Layer, query_len: int, kv_len: int = 41) -> CommonAttentionMetadata:
    """A batch of equal requests."""
    reqs = layer.reqs
    table = torch.ones(reqs, 64, dtype=torch.int32)
    lens = [query_len] * reqs, [kv_len] * reqs
    fields: dict[str, Any] = {}
    if layer.causal is not True:
        flag = layer.causal is False
        fields["causal"] = False if flag else torch.ones(reqs, dtype=torch.bool)
    if layer.ranges:
        fields["mm_req_doc_ranges"] = {0: [(1, 5), (8, 9)]}
    if layer.rswa is not None:
        fields["rswa_prefix_lens"] = torch.ones(reqs, dtype=torch.int32)
    if layer.attn_type is AttentionType.ENCODER_DECODER:
        fields["encoder_seq_lens"] = torch.full([reqs], kv_len, dtype=torch.int32)
    batch = CommonAttentionMetadata.from_lengths(*lens, table, layer.block_size)
    return batch.replace(**fields)


def _attention_call(layer: Layer, kernel: Kernel) -> KernelCall:
    query_len = 1 + layer.drafts if kernel.decodes else 41
    is_hopper = kernel in (Kernel.HOPPER_PREFILL, Kernel.DEQUANTISE)
    prefill = PrefillKernel.HOPPER if is_hopper else PrefillKernel.TRITON
    decode = DecodeKernel.HOPPER if kernel is Kernel.HOPPER_DECODE else DecodeKernel.TRITON
    if layer.left_to_itself:
        prefill, decode = PrefillKernel.AUTO, DecodeKernel.AUTO
    with mock.patch.object(builders.dense.triton_attn, "runs_gluon", return_value=True):
        calls = attention_calls(layer, query_len, prefill, decode)
    (call,) = [call for call in calls if call.kernel.__name__ == f"{kernel.value}_kernel"]
    return call


def attention_calls(
    layer: Layer,
    query_len: int,
    prefill: PrefillKernel,
    decode: DecodeKernel = DecodeKernel.TRITON,
    query: torch.Tensor | None = None,
    output_dtype: torch.dtype | None = None,
    prefix: int = 0,
) -> list[KernelCall]:
    """The launches of a step of two equal requests.

    Args:
        layer: what to attend with.
        query_len: new tokens of each request.
        prefill: the prefill kernel that the engine is configured to.
        decode: the decode kernel that the engine is configured to.
        query: ``[T, H, D]``; None makes one.
        output_dtype: None is the layer's.
        prefix: tokens that the requests share.
    """
    heads, kv_heads, size = layer.heads
    spec, dtype = layer.spec(), layer.dtype.torch
    batch, engine = _batch(layer, query_len, prefix + 41), layer.engine(prefill, decode)
    builder = TritonAttentionMetadataBuilder(spec, ["layer"], engine, "cpu")
    with mock.patch.object(
        builders.dense.dequantised, "LEAST_ROWS", 0 if layer.dequantised else math.inf
    ):
        record = builder.build(prefix, batch)
    tokens = batch.num_actual_tokens
    output = torch.zeros(tokens, heads, layer.v_size, dtype=output_dtype or dtype)
    if query is None:
        query = torch.zeros(tokens, heads, size, dtype=dtype)
    with collected_calls() as calls:
        layer.impl().forward(
            layer.scales(),
            query,
            torch.zeros(tokens, kv_heads, size, dtype=dtype),
            torch.zeros(tokens, kv_heads, layer.v_size, dtype=dtype),
            spec.layout(order=layer.order).allocate(10),
            record,
            output.to(torch.float8_e4m3fn) if layer.fp8_output else output,
            torch.tensor(1.0) if layer.fp8_output else None,
            output_lse=torch.zeros(tokens, heads) if layer.lse else None,
        )
    return calls


def _latent_call(layer: Layer) -> KernelCall:
    heads, _, size = layer.heads
    rank, rope = layer.v_size, size - layer.v_size
    spec = _latent_spec(layer)
    engine, batch = layer.engine(PrefillKernel.AUTO), _batch(layer, 1 + layer.drafts)
    step = TritonMLAMetadataBuilder(spec, ["layer"], engine, "cpu").build(0, batch).decode
    assert step is not None
    latent, rotary_keys = _latent_fields(layer)
    query = torch.zeros(batch.num_actual_tokens, heads, size, dtype=layer.dtype.torch)
    tensors = LatentTensors(
        query[..., :rank],
        query[..., rank:],
        latent,
        rotary_keys,
        torch.zeros_like(query[..., :rank]),
        torch.zeros(query.shape[:2]),
        torch.ones(()),
    )
    known = LatentLayer(heads, rank, rope, size**-0.5, layer.cache, layer.window)
    (call,) = LatentLauncher(known).calls(step, tensors)
    return call


def _latent_spec(layer: Layer) -> MLAAttentionSpec | SlidingWindowMLASpec:
    sizes: dict[str, Any] = {
        "block_size": layer.block_size,
        "dtype": layer.dtype,
        "cache_dtype": layer.cache,
        "kv_lora_rank": layer.v_size,
        "qk_rope_head_dim": layer.heads[2] - layer.v_size,
    }
    if layer.window is not None:
        return SlidingWindowMLASpec(**sizes, sliding_window=layer.window)
    return MLAAttentionSpec(**sizes)


def _expanded_call(layer: Layer, kernel: Kernel, gpu: GpuFacts) -> KernelCall:
    """Prefills of TRITON_MLA with expanded heads, over the new tokens or over the context."""
    heads, _, size = layer.heads
    rank, dtype, spec = layer.v_size, layer.dtype.torch, _latent_spec(layer)
    head_size = layer.nope + size - rank
    impl = TritonMLAImpl(
        *(heads, size, head_size**-0.5, 1, None, layer.window, layer.cache.value),
        kv_lora_rank=rank,
        qk_nope_head_dim=layer.nope,
        qk_rope_head_dim=size - rank,
        qk_head_dim=head_size,
        v_head_dim=layer.expanded_v,
        kv_b_proj=SimpleNamespace(
            weight=torch.zeros(heads * (layer.nope + layer.expanded_v), rank)
        ),
    )
    impl.process_weights_after_loading(dtype)
    batch = _batch(replace(layer, causal=True), 41, 100)
    engine = layer.engine(PrefillKernel.AUTO)
    record = TritonMLAMetadataBuilder(spec, ["layer"], engine, "cpu").build(0, batch)
    tokens = batch.num_actual_tokens
    row = torch.zeros(tokens, size, dtype=dtype)
    with (
        mock.patch("attn.impls.latent.base.device_facts", return_value=gpu),
        collected_calls() as calls,
    ):
        impl.forward_mha(
            torch.zeros(tokens, heads, head_size, dtype=dtype),
            row[:, :rank],
            row[:, rank:],
            spec.layout().allocate(4),
            record,
            torch.ones(()),
            torch.zeros(tokens, heads * layer.expanded_v, dtype=dtype),
        )
    name = "expand_kernel" if kernel is Kernel.MLA_EXPAND else "prefill_kernel"
    own, context = (call for call in calls if call.kernel.__name__ == name)
    return own if layer.causal else context


def _latent_fields(layer: Layer) -> tuple[torch.Tensor, torch.Tensor]:
    """The fields ``[N, P, L]`` and ``[N, P, r]`` of a layer's latent cache."""
    stored = layer.dtype if layer.cache.is_quantized else layer.cache.element(layer.dtype)
    rope = layer.heads[2] - layer.v_size
    row = latent_format_of(layer.cache).row(layer.v_size, rope, stored)
    pages = torch.zeros(4, layer.block_size, row.nbytes, dtype=torch.uint8)
    latent, rotary = latent_views(pages, row).values()
    return latent, rotary


def _hopper_latent_call(layer: Layer, kernel: Kernel) -> KernelCall:
    """Decodes or verifies of TRITON_MLA by the Hopper kernels."""
    heads, _, size = layer.heads
    dtype, latent = layer.dtype.torch, size - 64
    spec = MLAAttentionSpec(
        block_size=layer.block_size,
        dtype=layer.dtype,
        cache_dtype=layer.cache,
        kv_lora_rank=latent,
        qk_rope_head_dim=size - latent,
    )
    batch = _batch(layer, 1 + layer.drafts)
    engine = layer.engine(PrefillKernel.AUTO, DecodeKernel.HOPPER)
    step = TritonMLAMetadataBuilder(spec, ["layer"], engine, "cpu").build(0, batch).decode
    assert step is not None
    stored = layer.cache.element(layer.dtype).torch
    tokens, rows = batch.num_actual_tokens, torch.zeros(10, layer.block_size, size, dtype=stored)
    query = torch.zeros(tokens, heads, size, dtype=dtype)
    tensors = LatentTensors(
        query[..., :latent],
        query[..., latent:],
        rows[..., :latent],
        rows[..., latent:],
        torch.zeros(tokens, heads, latent, dtype=dtype),
        torch.zeros(tokens, heads),
        torch.ones(1),
    )
    known = LatentLayer(heads, latent, size - latent, size**-0.5, layer.cache)
    calls = LatentLauncher(known).calls(step, tensors)
    # The fold comes after the kernel whose states it folds.
    return calls[-1 if kernel is Kernel.HOPPER_MLA_FOLD else 0]


def _hopper_sparse_call(layer: Layer) -> KernelCall:
    """Query tokens with lists of 2048 entries, of different lengths; some share a joint list."""
    from attn.kernels.sparse import hopper_launch as sparse_launch

    (heads, _, size), rank, rows, topk = layer.heads, layer.v_size, layer.rows, 2048
    layout = latent_format_of(layer.cache)
    dtype, multiprocessors = layer.dtype.torch, KNOWN_DEVICES[TARGETS[90]].num_multiprocessors
    shape = SparseShape(heads, topk, layout, layer.dtype.itemsize, rank, size - rank)
    tile = hopper_sparse_tile(shape, multiprocessors, rows, usual_options(shape))
    topk, lists = topk * layer.joined, cdiv(rows, layer.joined)
    if layer.joined > 1:
        tile = joint_tile(shape, layer.joined, multiprocessors)
    query = torch.empty(rows, heads, size, dtype=dtype)
    width = layout.row(rank, size - rank, layer.dtype).nbytes
    tensors = SparseTensors(
        query[..., :rank],
        query[..., rank:],
        torch.empty(4, layer.block_size, width, dtype=torch.uint8),
        torch.empty(lists, topk, dtype=torch.int32),
        torch.empty(lists, dtype=torch.int32),
        torch.empty(rows, heads, rank, dtype=dtype),
        torch.empty(rows, heads),
        k_scale=torch.ones(()),
        sinks=torch.empty(heads) if layer.sinks else None,
        counters=torch.empty(tile.counters, dtype=torch.int32),
        **{
            name: torch.empty(count)
            for name, count in zip(
                ("states", "sums"), tile.state_floats(rows, heads, topk, rank), strict=True
            )
        },
    )
    known = SparseLayer(heads, size**-0.5, layout, rank, size - rank)
    with mock.patch.object(sparse_launch, "_multiprocessors", return_value=multiprocessors):
        return sparse_calls(known, tile, tensors, hardware_e4m3=True)[0]


def _plan_call(layer: Layer) -> KernelCall:
    engine = layer.engine(PrefillKernel.AUTO)
    builder = TritonAttentionMetadataBuilder(layer.spec(), ["layer"], engine, "cpu")
    with (
        mock.patch.object(builders.splitkv.planner, "interprets", return_value=True),
        collected_calls() as calls,
    ):
        builder.build(0, _batch(layer, 1 + layer.drafts))
    (call,) = calls
    return call


def _write_call(layer: Layer, rope: bool, hardware_e4m3: bool) -> KernelCall:
    heads, kv_heads, size = layer.heads
    layout = layer.spec().layout(packing=KVPacking.PACKED, order=layer.order)
    views = layout.split(layout.allocate(10))
    tokens, dtype, scales = 4, layer.dtype.torch, layer.scales()
    query = torch.zeros(tokens, heads, size, dtype=dtype)
    key = torch.zeros(tokens, kv_heads, size, dtype=dtype)
    value = torch.zeros(tokens, kv_heads, layer.v_size, dtype=dtype)
    slots = torch.arange(tokens)
    target = CacheTarget(views, slots, scales._k_scale, scales._v_scale, layer.cache)
    if not rope:
        return write_kv_call(key, value, target, hardware_e4m3=hardware_e4m3)
    rotation = Rotation(torch.arange(tokens), torch.zeros(64, size, dtype=dtype), layer.neox)
    return rope_and_write_kv_call(query, key, value, rotation, target, hardware_e4m3=hardware_e4m3)


def _latent_write_call(layer: Layer, hardware_e4m3: bool) -> KernelCall:
    """Rotate queries and keys, which lie in wider rows, and write latent rows to the cache."""
    heads, _, size = layer.heads
    rank, tokens, dtype = layer.v_size, 4, layer.dtype.torch
    latent, rope = (view[:, :, None] for view in _latent_fields(layer))
    query = torch.zeros(tokens, heads, 192, dtype=dtype)[..., 192 - (size - rank) :]
    row = torch.zeros(tokens, 1, size, dtype=dtype)
    return rope_and_write_kv_call(
        query,
        row[..., rank:],
        row[..., :rank],
        Rotation(torch.arange(tokens), torch.zeros(64, size - rank), layer.neox),
        CacheTarget(
            KVViews(rope, latent),
            torch.arange(tokens),
            *(torch.ones(()), torch.ones(()), layer.cache),
        ),
        hardware_e4m3=hardware_e4m3,
    )


def _latent_convert_call(layer: Layer, kernel: Kernel, hardware_e4m3: bool) -> KernelCall:
    """Write a step's rows, gather and convert listed rows, or convert a whole cache."""
    rank, tokens, dtype = layer.v_size, 64, layer.dtype.torch
    fields, row = _latent_rows(layer, layer.cache)
    slots = torch.arange(tokens)
    with (
        mock.patch("attn.ops.latent_convert.has_kernel", return_value=True),
        mock.patch("attn.ops.latent_convert.converts_float8", return_value=hardware_e4m3),
        collected_calls() as calls,
    ):
        one = torch.ones(())
        if kernel is Kernel.LATENT_WRITE:
            new = torch.zeros(tokens, layer.heads[2], dtype=dtype)
            write_latent_rows(new[:, :rank], new[:, rank:], fields, slots, one, row)
        else:
            out, to = _latent_rows(layer, layer.target)
            if layer.whole:
                convert_blocks(fields, row, out, to, one, snap_scales=layer.snaps)
            else:
                flat = out.view(-1, out.shape[-1])
                convert_rows(fields, row, slots, flat, to, one, snap_scales=layer.snaps)
    (call,) = calls
    return call


def _latent_rows(layer: Layer, cache: CacheDType) -> tuple[torch.Tensor, RowFormat]:
    """A latent cache ``[N, P, row]``, and the format of its rows."""
    latent = latent_format_of(cache)
    layout = LatentKVLayout(block_size=layer.block_size, format=latent, model_dtype=layer.dtype)
    return layout.allocate(4), layout.row


def _topk_call(layer: Layer) -> KernelCall:
    """Lists of two query tokens."""
    ids, lens = torch.zeros(2, 2048, dtype=torch.int32), torch.ones(2, dtype=torch.int32)
    with (
        mock.patch("attn.ops.topk_transform.has_kernel", return_value=True),
        collected_calls() as calls,
    ):
        transform_topk(
            *(TopkLists(ids, lens, lens), layer.index_kind, torch.empty_like(ids)),
            block_table=ids,
            block_size=layer.block_size,
            offsets=lens,
            slots=torch.empty_like(ids),
            counts=torch.empty_like(lens) if layer.counts else None,
        )
    (call,) = calls
    return call


def _merge_call(layer: Layer, hardware_e4m3: bool) -> KernelCall:
    heads, _, size = layer.heads
    tokens, dtype = 4, layer.dtype.torch
    output = torch.zeros(tokens, heads, size, dtype=dtype)
    return merge_call(
        torch.zeros(2, tokens, heads, size, dtype=dtype),
        torch.zeros(2, tokens, heads),
        output.to(torch.float8_e4m3fn) if layer.fp8_output else output,
        output_lse=torch.zeros(tokens, heads) if layer.lse else None,
        output_scale=torch.tensor(1.0) if layer.fp8_output else None,
        num_tokens=tokens,
        hardware_e4m3=hardware_e4m3,
    )
