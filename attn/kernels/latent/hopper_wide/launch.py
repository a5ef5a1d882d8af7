"""The launcher of the Hopper latent kernels, wide and narrow."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from attn.kernels.dense.hopper_launch import COLUMNS, Descriptors, asked, is_planned
from attn.kernels.dense.tensors import DenseLayer, DenseTensors
from attn.kernels.latent.hopper_narrow.kernel import hopper_mla_narrow_kernel
from attn.kernels.latent.hopper_wide.fold import ROWS_OF_TWO, fold_cuts_kernel
from attn.kernels.latent.hopper_wide.kernel import hopper_mla_kernel
from attn.kernels.latent.variants import check_tensors, plan_constants
from builders.latent.choice import latent_kernel_of
from builders.launch.call import LaunchOptions
from builders.launch.launcher import Launcher
from builders.launch.variants import Variants
from builders.splitkv.record import PLAN_POINTERS, SplitPlan, area_of
from specs.base import cdiv, power_of_two
from specs.devices import DeviceKind
from specs.engine import DecodeKernel
from specs.layouts import KVViews

if TYPE_CHECKING:
    from attn.kernels.latent.tensors import LatentLayer, LatentTensors
    from builders.dense.record import TritonAttentionMetadata

FINISH_CELLS = 2048
"""Elements of a state that the program which finishes a work item folds at a time."""
UNIT_BYTES = 16
"""Bytes that a thread loads at a time."""
UNIT = UNIT_BYTES // 2
"""16-bit elements of so many bytes."""
_WIDTH = 512


def check_serves(
    layer: DenseLayer, plan: SplitPlan, step: TritonAttentionMetadata, tensors: DenseTensors
) -> None:
    """Check that the Hopper kernel serves a step as planned; no other kernel can run such a plan.

    Args:
        layer: the constants of the layer.
        plan: the plan of the step, made for the Hopper kernel.
        step: the builder's record.
        tensors: the tensors of the forward.

    Raises:
        ValueError: the kernel does not serve it.
    """
    assert plan.hopper is not None
    shape, block_size, asks = asked(layer, step, tensors)
    # A plan that cuts items freely (the wide kernel's) was not asked to be batch invariant. Few
    # query rows get the narrow kernel either way.
    asks = replace(asks, batch_invariant=not plan.depends_on_batch)
    # A tile has all the query tokens that were asked for, or as many as fit.
    tokens, wanted = plan.tile.query_tokens, DecodeKernel.HOPPER
    tile, _ = latent_kernel_of(shape, DeviceKind.SM90, block_size, tokens, asks, wanted)
    assert tile is not None
    # The plan knows the tokens of a tile, not the tokens of the engine's verify, from which
    # ``reads_again`` follows; and only the engine knows whether queries are rounded. So the tile
    # takes both from the plan.
    decided = {name: getattr(plan.hopper, name) for name in ("reads_again", "rounds_queries")}
    is_planned(replace(tile, **decided), plan.hopper, True)
    for name, is_asked in {
        "an output scale": tensors.output_scale is not None,
        "sinks": tensors.sinks is not None,
        "a window": layer.sliding_window is not None or layer.attention_chunk_size is not None,
        "a soft cap": layer.logits_soft_cap is not None,
        "multimodal ranges": step.mm_ranges is not None,
        "a mask that is not causal": not layer.causal or step.causal is not True,
    }.items():
        if is_asked:
            raise ValueError(
                f"kernels.latent.decode 'hopper' does not serve latent layers with {name}"
            )


class HopperLatentLauncher:
    """The Hopper decode launches of one latent layer; no step falls back to the portable kernel.

    To checks and choices, which dense layers share, the layer has one KV head: its key is the whole
    row of the cache, its value the row's latent part.
    """

    def __init__(self, layer: LatentLayer) -> None:
        """
        Args:
            layer: the constants of the layer.
        """
        self._latent = layer
        self._width = layer.rank + layer.rope_size
        self._layer = DenseLayer(
            *(layer.num_heads, 1, self._width, layer.rank, layer.scale, layer.cache_dtype),
            causal=True,
            sliding_window=layer.sliding_window,
        )
        self._is_quantized = layer.cache_dtype.is_quantized
        self._variants: Variants[tuple[Launcher, Launcher | None, int]] = Variants()
        self._descriptors = Descriptors()

    def launch(
        self,
        plan: SplitPlan,
        step: TritonAttentionMetadata,
        tensors: LatentTensors,
        strides: tuple[int, int, int, int],
        variant: tuple[Any, ...],
    ) -> None:
        """Enqueue the launches of a step.

        The first is the kernel that attends. Where the plan cuts work items between any two tiles
        (the wide kernel), the kernel that folds the cuts follows.

        Args:
            plan: the plan of the step.
            step: the builder's record.
            tensors: the tensors of the forward.
            strides: elements from token to token and from head to head of the query, then of its
                rotary part.
            variant: the variant key.

        Raises:
            ValueError: the kernel does not serve the layer, or the tensors do not fit it.
        """
        hopper, rows = plan.hopper, tensors.rows
        assert hopper is not None
        assert rows is not None
        attends, fold, slices = self._variants.of(variant, self._new_launchers, plan, step, tensors)
        query, rotary, output, lse = tensors.query, tensors.rotary, tensors.output, tensors.lse
        query_token, query_head, rotary_token, rotary_head = strides
        places = query.data_ptr() | rotary.data_ptr()
        if places % UNIT_BYTES or (query_token | query_head | rotary_token | rotary_head) % UNIT:
            query, rotary = _in_units(query), _in_units(rotary)
            query_token, query_head, _ = query.stride()
            rotary_token, rotary_head, _ = rotary.stride()
        described = rows.described.get(hopper.run)
        if described is None:
            described = rows.described[hopper.run] = self._described(hopper.run, tensors)
        row_desc, rope_desc = described
        last: tuple[Any, ...]
        if fold is None:
            last = (rope_desc,)
        elif self._is_quantized:
            last = rope_desc, tensors.latent
        else:
            last = (tensors.latent,)
        programs, pointers, table = plan.groups * plan.heads, plan.pointers, step.block_table
        attends(
            (programs,),
            row_desc,
            query,
            rotary,
            query_token // UNIT,
            query_head // UNIT,
            rotary_token // UNIT,
            rotary_head // UNIT,
            output,
            lse,
            table,
            pointers,
            table.stride()[0],
            output.shape[0],
            tensors.k_scale,
            *last,
        )
        if fold is not None:
            fold((programs * slices,), output, lse, pointers)

    def _described(
        self, run: int, tensors: LatentTensors
    ) -> tuple[TensorDescriptor, TensorDescriptor]:
        """Two descriptors of the cache's whole rows, in boxes of ``run`` tokens.

        A box of the first has as many columns as a swizzled row; a box of the second has those of
        the rotary part, which only the narrow kernel loads by itself.
        """
        rows = self._whole(tensors)
        words = rows.view(torch.int16) if self._is_quantized else rows
        # The rotary part of e4m3 rows is 32 words of two elements; else it is 64 elements.
        columns = COLUMNS // 2 if self._is_quantized else COLUMNS
        of = self._descriptors.of
        return of("k", words, (1, run, COLUMNS)), of("rope", words, (1, run, columns))

    def _whole(self, tensors: LatentTensors) -> torch.Tensor:
        """The cache's whole rows, ``[N, P, L + r]``."""
        latent = tensors.latent
        return latent.as_strided((*latent.shape[:2], self._width), latent.stride())

    def _new_launchers(
        self, plan: SplitPlan, step: TritonAttentionMetadata, tensors: LatentTensors
    ) -> tuple[Launcher, Launcher | None, int]:
        """The launchers of a variant: of the kernel that attends, and of the fold if it has one.

        The number is that of the fold's programs for each program that attends.
        """
        check_tensors(self._latent, plan, step, tensors)
        constants, rows = plan_constants(plan), self._whole(tensors)
        keys = KVViews(rows[:, :, None], tensors.latent[:, :, None])
        scale = tensors.k_scale
        given = DenseTensors(tensors.query, keys, tensors.output, scale, scale, lse=tensors.lse)
        check_serves(self._layer, plan, step, given)
        output, lse = tensors.output, tensors.lse
        assert plan.hopper is not None
        fixed = {name: constants[name] for name in _PLANNED}
        fixed |= {
            "OUT_TOKEN": output.stride(0),
            "OUT_HEAD": output.stride(1),
            "LSE_TOKEN": 0 if lse is None else lse.stride(0),
            "scale": self._layer.scale,
            "GROUP": self._layer.num_heads,
            "BLOCK_SIZE": rows.shape[1],
            "RUN": plan.hopper.run,
            "LSE": lse is not None,
        }
        if plan.depends_on_batch:
            # Two e4m3 are one element of the descriptors.
            fixed |= {
                "cache_block": rows.stride(0) * rows.element_size() // 2,
                "E4M3": self._is_quantized,
                "TERMS": 1 if plan.hopper.rounds_queries else 2,
                # Where one work item reads a request's keys, memory is the limit: half of a block
                # is freed early. Where several do, products are the limit: nothing is freed early,
                # and the programs prefetch the next tile into L2.
                "EARLY": not plan.hopper.reads_again,
                "PREFETCH": plan.hopper.reads_again and rows.stride(1) == rows.shape[-1],
            }
            rope = ("rope_desc",) if self._is_quantized else ()
            if not rope:
                fixed["rope_desc"] = None
            attends = Launcher(
                hopper_mla_kernel,
                fixed,
                (*_VARYING, *rope, "cache_ptr"),
                groups=_PLAN,
                options=LaunchOptions(num_warps=4, waits=True),
                is_typed=True,
            )
            slices = cdiv(plan.tile.tile_heads * plan.tile.query_tokens, ROWS_OF_TWO)
            return attends, _new_fold(plan, attends, output), slices
        fixed |= {name: constants[name] for name in _SEGMENTED} | {
            "AREA": area_of(plan.slots, plan.segment_groups, plan.head_loops),
            "STAGES": plan.hopper.num_stages,
            "E4M3": self._is_quantized,
            "FINISH_WIDTH": min(_WIDTH, FINISH_CELLS // constants["FINISH_ROWS"]),
        }
        attends = Launcher(
            hopper_mla_narrow_kernel,
            fixed,
            (*_VARYING, "rope_desc"),
            groups=_PLAN,
            options=LaunchOptions(num_warps=8, waits=True),
            is_typed=True,
        )
        return attends, None, 0


def _in_units(part: torch.Tensor) -> torch.Tensor:
    """A part of the queries, copied if its rows do not start at multiples of 16 bytes.

    The kernels load 16 bytes at a time, and take strides in these units. An engine's queries have
    such rows; a slice of an odd tensor may not.
    """
    token, head, _ = part.stride()
    if (part.data_ptr() % UNIT_BYTES) | (token % UNIT) | (head % UNIT):
        return part.clone(memory_format=torch.contiguous_format)
    return part


def _new_fold(plan: SplitPlan, attends: Launcher, output: torch.Tensor) -> Launcher:
    """The launcher of the fold that runs after ``attends``, with the constants they share."""
    shared = ("HEADS", "HEAD_LOOPS", "GROUP", "TILE_HEADS", "QUERY_TOKENS", *_OUTPUTS)
    fixed = {name: attends.arguments[name] for name in shared}
    fixed |= {
        "groups": plan.groups,
        "GROUPS": power_of_two(plan.groups),
        "WAITS": output.is_cuda,
    }
    names = ("out_ptr", "lse_ptr", "plan")
    options = LaunchOptions(waits=True)
    return Launcher(fold_cuts_kernel, fixed, names, groups=_PLAN, options=options, is_typed=True)


_PLAN = {"plan": PLAN_POINTERS}
_OUTPUTS = ("OUT_TOKEN", "OUT_HEAD", "LSE_TOKEN", "LSE")
_PLANNED = ("HEADS", "HEAD_LOOPS", "TILE_HEADS", "QUERY_TOKENS")
_SEGMENTED = ("groups", "SLOTS", "SEGMENT_GROUPS", "SEGMENT_UNIT", "KV_TILE", "FINISH_ROWS")
_VARYING = (
    "k_desc",
    *("query_ptr", "rotary_ptr", "query_token", "query_head", "rotary_token", "rotary_head"),
    "out_ptr",
    "lse_ptr",
    "table_ptr",
    "plan",
    "table_row",
    "num_rows",
    "k_scale_ptr",
)
