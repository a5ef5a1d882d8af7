"""The limits that a builder's plans, tables and scratch are sized for, and checks of batches.

The checks read only host values, so that nothing waits for the device. Host lengths that are merely
bounds are never refused: plans clamp them, and ``ATTN_DEBUG=1`` finds lengths of the device that
exceed a limit (:mod:`builders.checks.debug`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from specs.base import cdiv
from specs.kv_cache import AnyKVCacheSpec, CrossAttentionSpec, EncoderOnlyAttentionSpec

if TYPE_CHECKING:
    import numpy as np

    from builders.batch import CommonAttentionMetadata
    from specs.engine import EngineConfig


@dataclass(frozen=True)
class StepLimits:
    """The limits of a step of one builder."""

    max_num_seqs: int
    """Most requests of a step."""
    max_num_tokens: int
    """Most tokens of a step."""
    tokens_name: str
    """Name of the engine's setting behind ``max_num_tokens``, for messages."""
    max_kv_len: int
    """Most keys of a request."""
    keys_name: str
    """Name of the engine's setting behind ``max_kv_len``, for messages."""
    column_tokens: int
    """Tokens of a request that one column of the block table stands for, counted over all ranks of
    decode context parallelism."""
    has_table: bool
    """The block table of a batch is checked too."""
    is_cross: bool
    """Keys are an encoder's (cross attention)."""
    is_exact: bool
    """``seq_lens_cpu_upper_bound`` of a batch equals the device's lengths."""

    @classmethod
    def of(cls, spec: AnyKVCacheSpec, config: EngineConfig) -> StepLimits:
        """The limits that an engine's settings give.

        Args:
            spec: spec of the group's cache.
            config: the engine's settings.
        """
        is_cross = isinstance(spec, CrossAttentionSpec)
        longest, keys_name = config.max_model_len, "max_model_len"
        if is_cross:
            longest, keys_name = config.max_encoder_len or longest, "max_encoder_len"
        ranks = 1
        if getattr(spec, "dcp_sharded", False):
            ranks = config.parallel.decode_context_parallel_size
        return cls(
            max_num_seqs=config.max_num_seqs,
            max_num_tokens=config.max_num_batched_tokens,
            tokens_name="max_num_batched_tokens",
            max_kv_len=longest,
            keys_name=keys_name,
            column_tokens=spec.block_size * ranks,
            has_table=not isinstance(spec, EncoderOnlyAttentionSpec),
            is_cross=is_cross,
            is_exact=config.exact_host_lengths,
        )

    def with_verifies(self, query_len: int) -> StepLimits:
        """The limits with ``max_num_tokens`` raised, if needed, to a verify of every request.

        Args:
            query_len: tokens of a verify.
        """
        tokens = self.max_num_seqs * query_len
        if tokens <= self.max_num_tokens:
            return self
        return replace(
            self, max_num_tokens=tokens, tokens_name=f"max_num_seqs * {query_len} tokens of each"
        )

    def without_table(self) -> StepLimits:
        """The limits for an engine whose block tables always hold its longest sequence."""
        return replace(self, has_table=False)

    def check(self, batch: CommonAttentionMetadata, is_draft: bool = False) -> None:
        """Refuse a batch for which plans, tables or scratch are too small.

        Args:
            batch: the step's batch, ours or vLLM's own object.
            is_draft: the batch is a draft step's, whose host lengths are only bounds.

        Raises:
            ValueError: there are too many requests or tokens, a tensor has too few requests, or, by
                exact host lengths, a request exceeds the limit or its row of the block table. The
                message has both values.
        """
        reqs = batch.num_reqs
        if reqs > self.max_num_seqs:
            raise _beyond("num_reqs", reqs, "max_num_seqs", self.max_num_seqs)
        if batch.num_actual_tokens > self.max_num_tokens:
            name, tokens = self.tokens_name, batch.num_actual_tokens
            raise _beyond("num_actual_tokens", tokens, name, self.max_num_tokens)
        encoder_lens = batch.encoder_seq_lens if self.is_cross else None
        lens = batch.seq_lens if encoder_lens is None else encoder_lens
        if lens.shape[0] < reqs or batch.query_start_loc.shape[0] <= reqs:
            raise ValueError(
                f"seq_lens and query_start_loc must have at least num_reqs ({reqs}) and "
                f"num_reqs + 1 elements, got {lens.shape[0]} and {batch.query_start_loc.shape[0]}"
            )
        columns, longest = 0, self.max_kv_len
        if self.has_table:
            rows, columns = batch.block_table_tensor.shape
            if rows < reqs:
                raise ValueError(
                    f"block_table_tensor must have at least num_reqs ({reqs}) rows, got {rows}"
                )
            longest = min(longest, columns * self.column_tokens)
        if encoder_lens is not None:
            self._check_encoder_lens(batch, columns)
        elif batch.max_seq_len > longest and self.is_exact and not is_draft:
            self._check_seq_lens(batch, columns)

    def _check_seq_lens(self, batch: CommonAttentionMetadata, columns: int) -> None:
        """Check each length of a batch whose ``max_seq_len`` exceeds a limit, as in every graph."""
        known = batch.seq_lens_cpu_upper_bound
        if known is not None:
            self._check_lens("seq_lens_cpu_upper_bound", known[: batch.num_reqs], columns)
        elif batch.max_seq_len > self.max_kv_len:
            raise _beyond("max_seq_len", batch.max_seq_len, self.keys_name, self.max_kv_len)

    def _check_encoder_lens(self, batch: CommonAttentionMetadata, columns: int) -> None:
        """Check encoder lengths, which no other bound of a batch covers.

        The host's encoder lengths are exact even with drafts. vLLM gives 0 for a request whose keys
        an earlier step wrote.
        """
        known = batch.encoder_seq_lens_cpu
        if known is not None:
            self._check_lens("encoder_seq_lens_cpu", known[: batch.num_reqs], columns)
        elif self.is_exact and columns > cdiv(self.max_kv_len, self.column_tokens):
            raise ValueError(
                f"encoder_seq_lens_cpu is needed where block_table_tensor has room for more keys "
                f"({columns * self.column_tokens}) than {self.keys_name} ({self.max_kv_len}), "
                "got None"
            )

    def _check_lens(self, name: str, lens: Any, columns: int) -> None:
        """Check ``[R]`` host lengths, a tensor or an array, against limit and block table."""
        if len(lens) == 0:
            return
        row = int(lens.argmax())
        longest = int(lens[row])
        if longest > self.max_kv_len:
            raise _beyond(f"{name}[{row}]", longest, self.keys_name, self.max_kv_len)
        if self.has_table and longest > columns * self.column_tokens:
            raise ValueError(
                f"{name}[{row}] ({longest}) needs {cdiv(longest, self.column_tokens)} blocks of "
                f"{self.column_tokens}, block_table_tensor has {columns} columns"
            )


def check_common_prefix(length: int, query_lens: np.ndarray, kv_lens: np.ndarray) -> None:
    """Check that every request with new tokens has computed the whole common prefix.

    Args:
        length: tokens of the common prefix.
        query_lens: ``[R]`` new tokens, on the host.
        kv_lens: ``[R]`` exact KV lengths, on the host.

    Raises:
        ValueError: a request has computed fewer tokens, or the two arrays differ in length.
    """
    if len(kv_lens) != len(query_lens):
        raise ValueError(
            f"seq_lens_cpu_upper_bound must have a length for each of the {len(query_lens)} "
            f"requests, got {len(kv_lens)}"
        )
    live = query_lens > 0
    if not length or not live.any():
        return
    context = int((kv_lens - query_lens)[live].min())
    if length > context:
        raise ValueError(
            f"common_prefix_len must be at most the computed tokens of every request, got "
            f"{length} and {context}"
        )


def _beyond(name: str, value: int, limit_name: str, limit: int) -> ValueError:
    return ValueError(
        f"{name} ({value}) exceeds {limit_name} ({limit}), which the builder's plans and buffers "
        "are sized for"
    )
