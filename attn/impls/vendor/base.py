"""The base of impls over FlashInfer's dense kernels: causal decoders, output in the model dtype."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Protocol

import torch

from attn.impls.base import AttentionLayer
from attn.impls.dense.cached import CachedImpl
from attn.impls.vendor.host_scales import HostScales
from builders.checks.debug import debug_read, debug_slots
from builders.checks.tensors import check_rows
from specs.attention import AttentionType
from specs.dtypes import KVQuantMode
from specs.layouts import KVViews


class VendorStep(Protocol):
    """The fields that every step record has."""

    num_actual_tokens: int
    query_start_loc: torch.Tensor
    slot_mapping: torch.Tensor
    block_table: torch.Tensor
    seq_lens: torch.Tensor

    def check_cache(self, block_size: int, dtype: torch.dtype) -> None:
        """See :meth:`builders.base.AttentionMetadata.check_cache`."""


class VendorRows(Protocol):
    """Consecutive rows of the query, which one call takes."""

    first_token: int
    num_tokens: int


class VendorImpl(CachedImpl):
    """Checks the tensors of every call, then makes the calls that the builder's record names."""

    backend_name: ClassVar[str]
    unsupported: ClassVar[tuple[str, ...]]
    """The names among sinks, logits_soft_cap and alibi_slopes of features that no kernel has."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """See :class:`attn.impls.dense.base.DenseImpl`.

        Raises:
            NotImplementedError: a feature that the kernels do not have; the message names it.
        """
        super().__init__(*args, **kwargs)
        refused = {name: getattr(self, name) for name in self.unsupported}
        refused["attention_chunk_size"] = self.rules.attention_chunk_size
        for name, value in refused.items():
            if value is not None:
                raise NotImplementedError(
                    f"{name} is not supported by {self.backend_name}, got {value}"
                )
        if self.attn_type is not AttentionType.DECODER:
            raise NotImplementedError(
                f"attn_type must be decoder for {self.backend_name}, got {self.attn_type.value!r}"
            )
        self._is_fp8 = self.cache_dtype.quant_mode is KVQuantMode.FP8_PER_TENSOR
        self._scales = HostScales(self.backend_name)

    def fused_output_quant_supported(self, quant_key: Any) -> bool:
        """Always False: outputs have the model's dtype here."""
        return False

    def forward(
        self,
        layer: AttentionLayer,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor,
        attn_metadata: VendorStep | None,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
        *,
        output_lse: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the base class.

        The host needs the scales of an fp8 cache, and of a query that goes with it in fp8. A layer
        may have them on the host, as vLLM's layers do (``_k_scale_float`` and so on). Otherwise
        they are read from the device once, at the layer's first call.

        Raises:
            NotImplementedError: with ``output_scale`` or ``output_block_scale``, or ``output_lse``
                where a kernel of the step has none.
            ValueError: tensors that do not fit the layer or the step, or a step of another layer;
                a cache whose layout a kernel of the step does not take.
        """
        if output_scale is not None or output_block_scale is not None:
            raise NotImplementedError(
                f"output_scale and output_block_scale: {self.backend_name} has none"
            )
        if attn_metadata is None:
            return output.zero_()
        rows, step = self._by_head(output), attn_metadata
        self._check_step(step, query, rows, output_lse)
        self._check_rows(step.num_actual_tokens, query, rows, output_lse)
        views = self._views(kv_cache, query.dtype)
        step.check_cache(views.key.shape[1], views.key.dtype)
        if self._debugs:
            debug_slots(step.slot_mapping, int(step.query_start_loc[-1]))
            debug_read(step.block_table, step.seq_lens, kv_cache.shape[0], views.key.shape[1])
        self._attend_step(step, layer, query, views, rows, output_lse)
        return output

    def _check_rows(
        self, tokens: int, query: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Check that every tensor has the layer's rows, one for each token of the step, and strides
        that the kernels can address.

        Raises:
            ValueError: a tensor that does not.
        """
        # shape[0] is used here since len() costs three times and size() twice as much.
        shape = self.num_heads, self.head_size
        if query.shape[1:] != shape or query.stride()[-1] != 1:
            check_rows("query", query, shape)
        if rows.shape[1:] != shape:
            check_rows("output", rows, shape)
        if query.shape[0] < tokens:
            raise _too_short("query", query, tokens)
        if rows.shape[0] < tokens:
            raise _too_short("output", rows, tokens)
        if not rows.is_contiguous():
            raise ValueError(f"output must be contiguous, got strides {rows.stride()}")
        if lse is not None:
            if lse.dtype != torch.float32:
                raise ValueError(f"output_lse must be float32, got {lse.dtype}")
            if lse.shape[1:] != (self.num_heads,):
                check_rows("output_lse", lse, (self.num_heads,))
            if lse.shape[0] < tokens:
                raise _too_short("output_lse", lse, tokens)
            if not lse.is_contiguous():
                raise ValueError(f"output_lse must be contiguous, got strides {lse.stride()}")

    @abstractmethod
    def _check_step(
        self, step: Any, query: torch.Tensor, rows: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Check that the step was built for a layer like this, and that its kernels take the types.

        Raises:
            ValueError: the step or a type does not fit.
            NotImplementedError: a kernel of the step returns no LSE, but ``lse`` is given.
        """

    @abstractmethod
    def _attend_step(
        self,
        step: Any,
        layer: AttentionLayer,
        query: torch.Tensor,
        views: KVViews,
        output: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        """Make every call of the step. ``output`` and ``lse`` have a row for each query row."""


def rows_of(
    part: VendorRows, query: torch.Tensor, output: torch.Tensor, lse: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The part's rows of query, output and LSE; the tensors themselves where it has all rows."""
    tokens = part.num_tokens
    if query.shape[0] == tokens and output.shape[0] == tokens and lse is None:
        return query, output, None
    rows = slice(part.first_token, part.first_token + tokens)
    return query[rows], output[rows], None if lse is None else lse[rows]


def _too_short(name: str, tensor: torch.Tensor, tokens: int) -> ValueError:
    return ValueError(
        f"{name} must have at least num_actual_tokens ({tokens}) rows, got {len(tensor)}"
    )
