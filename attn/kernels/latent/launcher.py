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
from builders.launch.call import KernelCall, LaunchOptions
from builders.launch.launcher import Launch, Launcher
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

    def __init__(self, layer: LatentLayer) -> None:
        """
        Args:
            layer: the constants of the layer.
        """
        self.layer = layer
        self._variants: Variants[Launcher] = Variants()
        self._clears: Variants[Launcher] = Variants()
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
        for launch in self._launches(step, tensors):
            launch.launch()

    def calls(
        self, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[KernelCall, ...]:
        """The launches for the step's decode rows, as data: nothing is enqueued.

        Args:
            step: the builder's record of the decode rows.
            tensors: the tensors of this forward.

        Raises:
            ValueError: the tensors do not fit the layer, or the plan was made for another layer.
        """
        return tuple(launch.call for launch in self._launches(step, tensors))

    def _launches(
        self, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[Launch, ...]:
        plan = step.split
        assert plan is not None
        if tensors.rows is None:
            tensors.rows = self._rows_of(tensors.latent, tensors.rope)
        variant, varying = _variant(plan, tensors), _varying(plan, step, tensors)
        if plan.hopper is not None:
            return self._on_hopper(plan, step, tensors, varying, variant)
        query, rotary = tensors.query, tensors.rotary
        for name, part in (("query", query), ("rotary", rotary)):
            # The strides of queries are no part of the variant key.
            if (part.shape[1] - 1) * part.stride(1) >= MOST_REACH:
                check_reach(name, part)
        latent, rope = self._words(tensors.latent), self._words(tensors.rope)
        varying["query_ptr"], varying["rotary_ptr"] = query, rotary
        varying["query_token"], varying["query_head"], _ = query.stride()
        varying["rotary_token"], varying["rotary_head"], _ = rotary.stride()
        varying["latent_ptr"], varying["rope_ptr"] = latent, rope
        varying["scale_ptr"] = tensors.k_scale

        def new_launcher() -> Launcher:
            check_tensors(self.layer, plan, step, tensors)
            fixed = self._fixed(tensors, latent, rope) | plan_constants(plan)
            fixed["FINISH_WIDTH"] = min(
                fixed["WIDTH"] * fixed["PLANES"], FINISH_CELLS // fixed["FINISH_ROWS"]
            )
            tile = plan.tile
            return Launcher(
                mla_decode_kernel,
                fixed,
                [*varying],
                groups={"plan": PLAN_POINTERS},
                options=LaunchOptions(
                    num_warps=tile.num_warps,
                    num_stages=tile.num_stages,
                    max_registers=tile.max_registers,
                ),
            )

        launcher = self._variants.of(variant, new_launcher)
        attends = launcher.bind((plan.groups * plan.heads,), varying)
        if not _has_padding(tensors):
            return (attends,)
        clears = self._clears.of(variant, lambda: _new_clear(launcher))
        return attends, clears.bind((tensors.output.shape[0],), varying)

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
        varying: dict[str, Any],
        variant: tuple[Any, ...],
    ) -> tuple[Launch, ...]:
        """The launches of the Hopper kernels."""
        if self._hopper is None:
            from attn.kernels.latent.hopper_wide.launch import HopperLatentLauncher

            self._hopper = HopperLatentLauncher(self.layer)
        return self._hopper.launches(plan, step, tensors, varying, variant)

    def _fixed(
        self, tensors: LatentTensors, latent: torch.Tensor, rope: torch.Tensor
    ) -> dict[str, Any]:
        """The arguments of the portable kernel that one compiled variant fixes."""
        layer, query, output = self.layer, tensors.query, tensors.output
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
    names = ("out_ptr", "lse_ptr", "plan")
    return Launcher(clear_padding_kernel, fixed, names, groups={"plan": PLAN_POINTERS})


def _varying(
    plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
) -> dict[str, Any]:
    """Arguments of the portable and the Hopper kernel that differ from call to call."""
    return {
        "out_ptr": tensors.output,
        "lse_ptr": tensors.lse,
        "table_ptr": step.block_table,
        "plan": plan.pointers,
        "table_row": step.block_table.stride()[0],
    }


def _variant(plan: SplitPlan, tensors: LatentTensors) -> tuple[Any, ...]:
    """The variant key: everything that a compiled variant depends on.

    The strides of queries are left out. They differ from batch to batch, since an engine's absorbed
    part lies head by head, and kernels take them as numbers.
    """
    query, rotary, rows = tensors.query, tensors.rotary, tensors.rows
    output, lse = tensors.output, tensors.lse
    assert rows is not None
    return (
        plan.static,
        rows.variant,
        query.dtype,
        query.device,
        query.shape[1:],
        query.stride()[2:],
        rotary.dtype,
        rotary.shape[1:],
        rotary.stride()[2:],
        output.dtype,
        output.shape[1:],
        output.stride(),
        None if lse is None else (lse.dtype, lse.shape[1:], lse.stride()),
        tensors.k_scale.numel(),
    )
