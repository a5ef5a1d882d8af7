"""Latent rows expanded to keys and values of every head, for prefill over a latent cache.

A program takes a tile of rows and one head. It sums over the latent dimension in steps whose order
does not depend on the number of rows, so a row's bits depend on that row alone. A library's matrix
product would choose its order by the size of the batch.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from attn.kernels.dense.tile import dot
from attn.kernels.lang.numerics import INTERPRETED, decode_e4m3, round_to, to_float32
from builders.latent.prefill import PagedRows
from builders.launch.call import KernelCall, LaunchOptions, collected_calls
from builders.launch.launcher import Launcher
from builders.launch.variants import Variants
from specs.base import power_of_two
from specs.devices import DeviceKind, GpuFacts
from specs.layouts import KVViews

_VARYING = ["num_rows", "span", "table_row"]
_MOST_STAGES = 4
_ANYWHERE = ["table_ptr", "start_ptr", "lens_ptr", "packed_ptr", "scale_ptr"]


@triton.jit
def _in_model_type(x, factor, DTYPE: tl.constexpr, E4M3: tl.constexpr, HARDWARE_E4M3: tl.constexpr):
    """Stored elements converted to the model's type; e4m3 ones are multiplied by ``factor``."""
    if E4M3:
        x = decode_e4m3(x, HARDWARE_E4M3).to(tl.float32) * factor
    else:
        x = to_float32(x)
    return round_to(x, DTYPE)


@triton.jit
def _product(x, weights, accumulator, IEEE: tl.constexpr):
    """``accumulator + x @ weights``; a row's bits do not depend on its place in the tile."""
    if INTERPRETED:
        # The interpreter multiplies with numpy, whose order of sums depends on a row's place.
        wide = to_float32(x)[:, :, None] * to_float32(weights)[None, :, :]
        result = accumulator + tl.sum(wide, 1)
    else:
        result = dot(x, weights, accumulator, IEEE)
    return result


@triton.jit
def _waited_for(a, b, at):
    """The sums ``a`` and ``b`` of a step, unchanged, once the step's products are complete.

    Products of warp groups read rows from registers while they run, and the compiler would start
    the next step meanwhile. ptxas before 13.3 then gives those registers to the next step's rows.
    Any use of the sums waits for the products, so each sum passes a ``where`` that changes nothing.
    """
    if not INTERPRETED:
        if cuda_capability_geq(9, 0) and not cuda_capability_geq(10, 0):
            a = tl.where(at >= 0, a, 0.0)
            b = tl.where(at >= 0, b, 0.0)
    return a, b


@triton.jit(do_not_specialize=_VARYING, do_not_specialize_on_alignment=_ANYWHERE)
def expand_kernel(
    latent_ptr,
    rope_ptr,
    uk_ptr,
    uv_ptr,
    key_ptr,
    value_ptr,
    table_ptr,
    start_ptr,
    lens_ptr,
    packed_ptr,
    scale_ptr,
    latent_block,
    latent_token,
    rope_block,
    rope_token,
    uk_latent,
    uk_head,
    uk_column,
    uv_latent,
    uv_head,
    uv_column,
    table_row,
    num_rows,
    span,
    HEADS: tl.constexpr,
    RANK: tl.constexpr,
    NOPE: tl.constexpr,
    ROPE: tl.constexpr,
    SIZE_V: tl.constexpr,
    NOPE_WIDTH: tl.constexpr,
    ROPE_WIDTH: tl.constexpr,
    V_WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    PACKED: tl.constexpr,
    DTYPE: tl.constexpr,
    IEEE: tl.constexpr,
    E4M3: tl.constexpr,
    HARDWARE_E4M3: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Write dense keys ``[S, HEADS, NOPE + ROPE]`` and values ``[S, HEADS, SIZE_V]``; grid
    ``(HEADS, tiles)``.

    With BLOCK_SIZE 0, latent is ``[S, RANK]`` and rope ``[S, ROPE]``. Otherwise both lie in a cache
    ``[N, BLOCK_SIZE, ...]``, and row ``r * span + i`` is token ``start[r] + i`` of request r. Where
    i is ``lens[r]`` or more, nothing is read and nothing is written; start and lens are ``[R]``
    int32. With PACKED, the row is written as row ``packed[r] + i``.
    """
    head = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    live = row < num_rows
    latent_at = row.to(tl.int64) * latent_token
    rope_at = row.to(tl.int64) * rope_token
    if BLOCK_SIZE > 0:
        req = row // span
        token = row % span
        live = live & (token < tl.load(lens_ptr + req, mask=live, other=0))
        if PACKED:
            row = tl.load(packed_ptr + req, mask=live, other=0) + token
        token += tl.load(start_ptr + req, mask=live, other=0)
        page = tl.load(
            table_ptr + req.to(tl.int64) * table_row + token // BLOCK_SIZE, mask=live, other=0
        ).to(tl.int64)
        latent_at = page * latent_block + token % BLOCK_SIZE * latent_token
        rope_at = page * rope_block + token % BLOCK_SIZE * rope_token
    if tl.max(live.to(tl.int32), 0) > 0:
        factor = 1.0
        if E4M3:
            factor = tl.load(scale_ptr)
        step = tl.arange(0, STEP)
        p = tl.arange(0, NOPE_WIDTH)
        v = tl.arange(0, V_WIDTH)
        uk = uk_ptr + head * uk_head + p * uk_column
        uv = uv_ptr + head * uv_head + v * uv_column
        nope = tl.zeros([ROWS, NOPE_WIDTH], tl.float32)
        value = tl.zeros([ROWS, V_WIDTH], tl.float32)
        for at in tl.range(0, RANK, STEP, num_stages=STAGES):
            column = at + step
            inside = column < RANK
            x = tl.load(
                latent_ptr + latent_at[:, None] + column[None, :],
                mask=live[:, None] & inside[None, :],
                other=0,
            )
            x = _in_model_type(x, factor, DTYPE, E4M3, HARDWARE_E4M3)
            wide = column.to(tl.int64)[:, None]
            weights = tl.load(
                uk[None, :] + wide * uk_latent,
                mask=inside[:, None] & (p < NOPE)[None, :],
                other=0.0,
            )
            nope = _product(x, weights, nope, IEEE)
            weights = tl.load(
                uv[None, :] + wide * uv_latent, mask=inside[:, None] & (v < SIZE_V)[None, :],
                other=0.0,
            )  # fmt: skip
            value = _product(x, weights, value, IEEE)
            if E4M3:
                nope, value = _waited_for(nope, value, at)
        out = row.to(tl.int64) * HEADS + head
        key = key_ptr + (out * (NOPE + ROPE))[:, None]
        tl.store(key + p[None, :], round_to(nope, DTYPE), mask=live[:, None] & (p < NOPE)[None, :])
        tl.store(
            value_ptr + (out * SIZE_V)[:, None] + v[None, :],
            round_to(value, DTYPE),
            mask=live[:, None] & (v < SIZE_V)[None, :],
        )
        q = tl.arange(0, ROPE_WIDTH)
        mask = live[:, None] & (q < ROPE)[None, :]
        rope = tl.load(rope_ptr + rope_at[:, None] + q[None, :], mask=mask, other=0)
        rope = _in_model_type(rope, factor, DTYPE, E4M3, HARDWARE_E4M3)
        tl.store(key + NOPE + q[None, :], rope, mask=mask)


class ExpandLauncher:
    """The launches that expand the latent rows of one layer.

    A launcher for each compiled variant is made once and kept.
    """

    def __init__(self, gpu: GpuFacts) -> None:
        """
        Args:
            gpu: the GPU that runs the kernel.
        """
        self._gpu = gpu
        self._variants: Variants[Launcher] = Variants()

    def launch(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        weights: tuple[torch.Tensor, torch.Tensor],
        into: KVViews,
        paged: PagedRows | None = None,
        scale: torch.Tensor | None = None,
    ) -> None:
        """Enqueue the launch that expands latent rows.

        Args:
            rows: latent parts ``[S, L]``, or ``[N, P, L]`` of a cache, and rotary parts ``[S, r]``
                or ``[N, P, r]``, each in any strides that leave rows dense.
            weights: up-projections ``[L, H, P]`` and ``[L, H, V]`` in the model's type.
            into: keys ``[S, H, P + r]`` and values ``[S, H, V]``, dense, to write.
            paged: the rows of the cache to expand; None for rows that follow one another.
            scale: fp32 scalar that multiplies an e4m3 cache; None: rows are in the model's type.

        Raises:
            ValueError: rows are not as wide as weights and keys say.
        """
        (latent, rope), (w_uk, w_uv), keys, values = rows, weights, into.key, into.value
        variant = (
            *(_kind(one) for one in (latent, rope, w_uk, w_uv, keys, values)),
            w_uk.shape[0],
            None if scale is None else (scale.dtype, scale.is_cuda),
            None if paged is None else paged.types,
        )
        launcher = self._variants.of(variant, self._new_launcher, rows, weights, into, paged, scale)
        count = keys.shape[0]
        cached: tuple[Any, ...] = ()
        if paged is not None:
            table = paged.block_table
            cached = table, paged.starts, paged.lens, table.stride()[0], paged.span
            if paged.packed is not None:
                cached += (paged.packed,)
        launcher(
            (w_uk.shape[1], -(-count // launcher.arguments["ROWS"])),
            _bytes_of(latent),
            _bytes_of(rope),
            w_uk,
            w_uv,
            keys,
            values,
            count,
            *cached,
            *(() if scale is None else (scale,)),
        )

    def _new_launcher(
        self,
        rows: tuple[torch.Tensor, torch.Tensor],
        weights: tuple[torch.Tensor, torch.Tensor],
        into: KVViews,
        paged: PagedRows | None,
        scale: torch.Tensor | None,
    ) -> Launcher:
        """The launcher of a new variant; the arguments are those of :meth:`launch`."""
        (latent, rope), (w_uk, w_uv), keys, values = rows, weights, into.key, into.value
        gpu, (rank, heads, nope) = self._gpu, w_uk.shape
        widths, wanted = (latent.shape[-1], rope.shape[-1]), (rank, keys.shape[2] - nope)
        if widths != wanted:
            raise ValueError(
                f"latent rows must have {wanted[0]} + {wanted[1]} columns, got {widths[0]} + "
                f"{widths[1]}"
            )
        dtype, ieee = w_uk.dtype, w_uk.dtype == torch.float32
        nope_width, v_width = max(power_of_two(nope), 16), max(power_of_two(values.shape[2]), 16)
        tile, step = (32, 32) if ieee else (_rows(nope_width + v_width, gpu), 64)
        fixed = {
            "latent_block": 0 if paged is None else latent.stride(0),
            "latent_token": latent.stride(-2),
            "rope_block": 0 if paged is None else rope.stride(0),
            "rope_token": rope.stride(-2),
            **{f"uk_{axis}": n for axis, n in zip(_AXES, w_uk.stride(), strict=True)},
            **{f"uv_{axis}": n for axis, n in zip(_AXES, w_uv.stride(), strict=True)},
            "HEADS": heads,
            "RANK": rank,
            "NOPE": nope,
            "ROPE": keys.shape[2] - nope,
            "SIZE_V": values.shape[2],
            "NOPE_WIDTH": nope_width,
            "ROPE_WIDTH": power_of_two(keys.shape[2] - nope),
            "V_WIDTH": v_width,
            "ROWS": tile,
            "STEP": step,
            "BLOCK_SIZE": 0 if paged is None else latent.shape[1],
            "PACKED": paged is not None and paged.packed is not None,
            "DTYPE": _TYPES[dtype],
            "IEEE": ieee,
            "E4M3": scale is not None,
            "HARDWARE_E4M3": gpu.converts_float8,
            "STAGES": 2 if ieee else _stages(step * (tile + nope_width + v_width), gpu),
        }
        varying = [*_GIVEN]
        if paged is None:
            fixed |= {"table_row": 0, "span": 1} | dict.fromkeys(_PAGED[:3])
        else:
            varying += _PAGED
        for name, is_given in (("packed_ptr", fixed["PACKED"]), ("scale_ptr", fixed["E4M3"])):
            if is_given:
                varying.append(name)
            else:
                fixed[name] = None
        options = LaunchOptions(num_warps=4 if ieee else 8)
        return Launcher(expand_kernel, fixed, varying, options=options, is_typed=True)


def expand_call(
    latent: torch.Tensor,
    rope: torch.Tensor,
    w_uk: torch.Tensor,
    w_uv: torch.Tensor,
    into: KVViews,
    *,
    paged: PagedRows | None = None,
    scale: torch.Tensor | None = None,
    gpu: GpuFacts,
) -> KernelCall:
    """The launch of :meth:`ExpandLauncher.launch` as data, by a launcher of its own."""
    with collected_calls() as calls:
        ExpandLauncher(gpu).launch((latent, rope), (w_uk, w_uv), into, paged, scale)
    return calls[0]


_GIVEN = ("latent_ptr", "rope_ptr", "uk_ptr", "uv_ptr", "key_ptr", "value_ptr", "num_rows")
"""Arguments that every launch is given."""
_PAGED = ("table_ptr", "start_ptr", "lens_ptr", "table_row", "span")
"""More arguments of a launch that expands rows of a cache."""
_AXES = ("latent", "head", "column")
_TYPES = {torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float32: tl.float32}


def _kind(rows: torch.Tensor) -> tuple[Any, ...]:
    """The part of the variant key that stands for a tensor of rows or weights."""
    return rows.dtype, rows.is_cuda, rows.shape[1:], rows.stride()


def _bytes_of(rows: torch.Tensor) -> torch.Tensor:
    return rows.view(torch.uint8) if rows.dtype == torch.float8_e4m3fn else rows


def _rows(columns: int, gpu: GpuFacts) -> int:
    """Rows of a tile, so that a thread of eight warps has registers for its fp32 sums.

    Products of Hopper read both operands from shared memory, those of B200 have their sums in
    tensor memory. Warps of other GPUs have operands in registers too, and so do those of B200 with
    tiles of 32 rows: sums of 512 columns leave no tensor memory for rows converted from e4m3.
    """
    has_room = gpu.kind is DeviceKind.SM90 or (gpu.kind is DeviceKind.SM100 and columns <= 256)
    return min((128 if has_room else 64) * 256 // columns, 128)


def _stages(elements: int, gpu: GpuFacts) -> int:
    """Steps whose operands of so many 16-bit elements are in shared memory at the same time.

    On an H200, 8,192 rows of 128 heads took 932 us with two stages, 716 with three, 684 with four.
    Other GPUs are not measured.
    """
    if gpu.kind is not DeviceKind.SM90:
        return 2
    return min(max(gpu.shared_memory // (2 * elements), 2), _MOST_STAGES)
