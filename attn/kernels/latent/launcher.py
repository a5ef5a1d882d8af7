"""The launcher of latent (MLA) decode: it makes launches of a layer, a step and tensors."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
import triton.language as tl

from attn.kernels.dense.checks import check_reach
from attn.kernels.lang.numerics import INTERPRETED
from attn.kernels.lang.stored import E4M3, NATIVE, decode_form
from attn.kernels.latent.decode import mla_decode_kernel
from attn.kernels.latent.padding import clear_padding_kernel
from attn.kernels.latent.tensors import LatentLayer, LatentTensors, StoredRows
from attn.kernels.latent.variants import TYPES, check_tensors, plan_constants
from builders.dense.record import TritonAttentionMetadata
from builders.launch.call import KernelCall, LaunchOptions, collected_calls
from builders.launch.launcher import Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import PLAN_POINTERS, SplitPlan
from specs.base import power_of_two

if TYPE_CHECKING:
    from attn.kernels.latent.hopper_wide.launch import HopperLatentLauncher

FINISH_CELLS = 2048
"""Elements of a state that the program which finishes a work item folds at a time."""
MOST_REACH = 1 << 31
"""Elements from the first to the last head of a token that 32 bits can count."""


class LatentLauncher:
    """The decode launches of one layer.

    A launcher for each compiled variant is made once and kept. A later forward of the same variant
    only hands over addresses and sizes.
    """

    tensors = LatentTensors
    """The class of :meth:`attend`'s argument.

    An impl imports this module late; with the class here, no forward has to import it again."""

    def __init__(self, layer: LatentLayer) -> None:
        """
        Args:
            layer: the constants of the layer.
        """
        self.layer = layer
        self._variants: Variants[tuple[Launcher, Launcher]] = Variants()
        self._stored: Variants[StoredRows] = Variants()
        self._hopper: HopperLatentLauncher | None = None

    def attend(self, step: TritonAttentionMetadata, tensors: LatentTensors) -> None:
        """Enqueue the step's launches.

        Args:
            step: the builder's record of the decode rows.
            tensors: the tensors of this forward.

        Raises:
            ValueError: the tensors do not fit the layer, or the plan was made for another layer.
        """
        plan = step.split
        assert plan is not None
        if tensors.rows is None:
            tensors.rows = self._rows_of(tensors.latent, tensors.rope)
        query, rotary, table = tensors.query, tensors.rotary, step.block_table
        try:
            query_token, query_head, query_column = query.stride()
            rotary_token, rotary_head, rotary_column = rotary.stride()
            variant = _variant(plan, table, tensors, (query_column, rotary_column))
        except ValueError:
            check_tensors(self.layer, plan, step, tensors)
            raise
        strides = query_token, query_head, rotary_token, rotary_head
        if plan.hopper is not None:
            self._on_hopper(plan, step, tensors, strides, variant)
            return
        most = max(query_head, rotary_head) * (query.shape[1] - 1)
        if most >= MOST_REACH:
            # The strides of queries are no part of the variant key.
            check_reach("query", query)
            check_reach("rotary", rotary)
        attends, clears = self._variants.of(variant, self._new_launchers, plan, step, tensors)
        output, lse, pointers = tensors.output, tensors.lse, plan.pointers
        attends(
            (plan.groups * plan.heads,),
            query,
            rotary,
            *strides,
            self._words(tensors.latent),
            self._words(tensors.rope),
            tensors.k_scale,
            output,
            lse,
            table,
            table.stride()[0],
            pointers,
        )
        if _has_padding(tensors):
            clears((output.shape[0],), output, lse, pointers)

    def calls(
        self, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[KernelCall, ...]:
        """The launches of :meth:`attend` as data: nothing is enqueued.

        Arguments and errors are those of :meth:`attend`.
        """
        with collected_calls() as calls:
            self.attend(step, tensors)
        return tuple(calls)

    def _new_launchers(
        self, plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[Launcher, Launcher]:
        """The launchers of a new variant: of the kernel that attends, and of the one that clears
        padding after it.
        """
        check_tensors(self.layer, plan, step, tensors)
        fixed = self._fixed(tensors) | plan_constants(plan)
        width = fixed["WIDTH"] * fixed["PLANES"]
        fixed["FINISH_WIDTH"] = min(width, FINISH_CELLS // fixed["FINISH_ROWS"])
        tile = plan.tile
        attends = Launcher(
            mla_decode_kernel,
            fixed,
            _VARYING,
            groups=_PLAN,
            options=LaunchOptions(
                num_warps=tile.num_warps,
                num_stages=tile.num_stages,
                max_registers=tile.max_registers,
            ),
            is_typed=True,
        )
        return attends, _new_clear(attends)

    def _rows_of(self, latent: torch.Tensor, rope: torch.Tensor) -> StoredRows:
        """What launches depend on in a cache, kept for tensors at the same addresses.

        Engines may view a cache anew for every forward.
        """
        key = (
            *(latent.data_ptr(), latent.dtype, latent.shape, latent.stride()),
            *(rope.data_ptr(), rope.dtype, rope.shape, rope.stride()),
        )
        return self._stored.of(key, lambda: StoredRows(latent, rope))

    def _words(self, rows: torch.Tensor) -> torch.Tensor:
        """Cache rows as the words that kernels load: int16 of an fp8 cache, else elements."""
        return rows.view(torch.int16) if self.layer.cache_dtype.is_quantized else rows

    def _on_hopper(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: LatentTensors,
        strides: tuple[int, int, int, int],
        variant: tuple[Any, ...],
    ) -> None:
        """Enqueue the launches of the Hopper kernels."""
        if self._hopper is None:
            from attn.kernels.latent.hopper_wide.launch import HopperLatentLauncher

            self._hopper = HopperLatentLauncher(self.layer)
        self._hopper.launch(plan, step, tensors, strides, variant)

    def _fixed(self, tensors: LatentTensors) -> dict[str, Any]:
        """The arguments of the portable kernel that one compiled variant fixes."""
        layer, query, output = self.layer, tensors.query, tensors.output
        latent, rope = self._words(tensors.latent), self._words(tensors.rope)
        quantized = layer.cache_dtype.is_quantized
        planes = 2 if quantized else 1
        # Rows of another 16-bit type are multiplied in fp32: fp16 lacks bf16's range, and bf16
        # lacks fp16's precision.
        same = quantized or latent.dtype == query.dtype
        # Triton's interpreter multiplies the bit patterns of bf16 as if they were integers.
        is_wrong = INTERPRETED.value and query.dtype == torch.bfloat16
        used, rope_used = layer.rank // planes, layer.rope_size // planes
        starts = (rows.data_ptr() // rows.element_size() for rows in (latent, rope))
        decode, _ = decode_form(query.device)
        return {
            "out_token": output.stride(0),
            "out_head": output.stride(1),
            "lse_token": 0 if tensors.lse is None else tensors.lse.stride(0),
            "block": latent.stride(0),
            "stride": latent.stride(1),
            "scale": layer.scale,
            "window": layer.sliding_window or 0,
            "WINDOW": layer.sliding_window is not None,
            "NUM_HEADS": layer.num_heads,
            "BLOCK_SIZE": latent.shape[1],
            "SIZE": layer.rank,
            "WIDTH": max(power_of_two(used), 16),
            "USED": used,
            "ROPE_SIZE": layer.rope_size,
            "ROPE_WIDTH": max(power_of_two(rope_used), 16),
            "ROPE_USED": rope_used,
            "KIND": E4M3 if quantized else NATIVE,
            "PLANES": planes,
            "DECODE": decode,
            "COMPUTE": TYPES[query.dtype] if same and not is_wrong else tl.float32,
            # Every row starts at a multiple of this power of two, at most 16, of words.
            "ALIGN": math.gcd(16, latent.stride(0), latent.stride(1), *starts),
            "SIMPLE": layer.scale > 0,
            "LSE": tensors.lse is not None,
        }


def _has_padding(tensors: LatentTensors) -> bool:
    """Whether there may be rows that no request owns, and that are to be cleared.

    A captured graph is replayed for other steps, so it must expect such rows in any case.
    """
    covered, output = tensors.num_covered, tensors.output
    if covered is None:
        return False
    return output.shape[0] > covered or (
        output.is_cuda and torch.cuda.is_current_stream_capturing()
    )


def _new_clear(attends: Launcher) -> Launcher:
    """The launcher of the kernel that clears padding after ``attends``."""
    shared = ("out_token", "out_head", "lse_token", "NUM_HEADS", "SIZE", "LSE")
    fixed = {name: attends.arguments[name] for name in shared}
    fixed["WIDTH"] = power_of_two(fixed["SIZE"])
    return Launcher(clear_padding_kernel, fixed, _CLEARED, groups=_PLAN, is_typed=True)


def _variant(
    plan: SplitPlan, table: torch.Tensor, tensors: LatentTensors, columns: tuple[int, int]
) -> tuple[Any, ...]:
    """The variant key: everything that a compiled variant depends on.

    The strides of queries are left out, but for ``columns``, those from column to column of the
    query and of its rotary part. They differ from batch to batch, since an engine's absorbed part
    lies head by head, and kernels take them as numbers. The type of every tensor is part of the
    key, so that launchers need not check it.

    Raises:
        ValueError: a tensor has another number of dimensions.
    """
    query, rotary, rows = tensors.query, tensors.rotary, tensors.rows
    output, lse, scale = tensors.output, tensors.lse, tensors.k_scale
    assert rows is not None
    # Unpacking a whole shape costs less than slicing it.
    _, heads, size = query.shape
    _, rotary_heads, rotary_size = rotary.shape
    _, out_heads, out_size = output.shape
    return (
        plan.static,
        rows.variant,
        columns,
        query.dtype,
        query.get_device(),
        heads,
        size,
        rotary.dtype,
        rotary.is_cuda,
        rotary_heads,
        rotary_size,
        output.dtype,
        output.is_cuda,
        out_heads,
        out_size,
        output.stride(),
        None if lse is None else (lse.dtype, lse.is_cuda, lse.shape[-1], lse.stride()),
        scale.dtype,
        scale.is_cuda,
        scale.numel(),
        table.dtype,
        table.is_cuda,
    )


_PLAN = {"plan": PLAN_POINTERS}
_VARYING = (
    *("query_ptr", "rotary_ptr", "query_token", "query_head", "rotary_token", "rotary_head"),
    *("latent_ptr", "rope_ptr", "scale_ptr", "out_ptr", "lse_ptr", "table_ptr", "table_row"),
    "plan",
)
"""Arguments that every launch of the portable kernel is given."""
_CLEARED = ("out_ptr", "lse_ptr", "plan")
"""Arguments that every launch of the kernel that clears padding is given."""
