"""The full check of a batch, device values included: for debugging."""

from __future__ import annotations

import torch

from builders.batch import CommonAttentionMetadata
from builders.pages.paging import check_block_table, check_slots
from specs.attention import AttentionType


def check_invariants(
    batch: CommonAttentionMetadata,
    *,
    attn_type: AttentionType = AttentionType.DECODER,
    block_size: int | None = None,
    num_blocks: int | None = None,
) -> None:
    """Full check of a batch; reads device values, so it is for debugging (``ATTN_DEBUG=1``).

    Args:
        batch: the step's batch.
        attn_type: cross attention and encoders have lengths of their own: ``seq_lens`` is then
            not bounded below by the query lengths.
        block_size: tokens per block, to check that the table is wide enough.
        num_blocks: blocks of the cache, to check that no id lies outside it.

    Raises:
        TypeError: a tensor of the wrong dtype.
        ValueError: anything else; the message names field, expectation and value.
    """
    _check_dtypes_and_shapes(batch)
    query_lens, seq_lens = _check_query_start_loc(batch)
    live = query_lens > 0
    if int(seq_lens.min() if len(seq_lens) else 0) < 0:
        raise ValueError(f"seq_lens must not be negative, got {int(seq_lens.min())}")
    if attn_type is AttentionType.DECODER:
        short = torch.nonzero(live & (seq_lens > 0) & (seq_lens < query_lens)).flatten()
        if len(short):
            row = int(short[0])
            raise ValueError(
                f"seq_lens[{row}] must be at least the query length {int(query_lens[row])}, "
                f"got {int(seq_lens[row])}"
            )
    if len(seq_lens) and int(seq_lens.max()) > batch.max_seq_len:
        raise ValueError(
            f"max_seq_len must bound seq_lens ({int(seq_lens.max())}), got {batch.max_seq_len}"
        )
    if attn_type.is_cached and block_size is not None:
        lens = batch.seq_lens
        if attn_type is AttentionType.ENCODER_DECODER and batch.encoder_seq_lens is not None:
            lens = batch.encoder_seq_lens
        check_block_table(batch.block_table_tensor, lens, block_size, num_blocks)
    if attn_type is AttentionType.DECODER:
        check_slots(batch.slot_mapping, block_size, num_blocks)


def _check_dtypes_and_shapes(batch: CommonAttentionMetadata) -> None:
    reqs, tokens = batch.num_reqs, batch.num_actual_tokens
    expected = {
        "query_start_loc": (torch.int32, reqs + 1),
        "query_start_loc_cpu": (torch.int32, reqs + 1),
        "seq_lens": (torch.int32, reqs),
        "block_table_tensor": (torch.int32, reqs),
        "slot_mapping": (torch.int64, tokens),
    }
    for name, (dtype, length) in expected.items():
        tensor = getattr(batch, name)
        if tensor.dtype != dtype:
            raise TypeError(f"{name} must be {dtype}, got {tensor.dtype}")
        # A padded batch can carry more slots than tokens, never fewer.
        wrong = tensor.shape[0] < length if name == "slot_mapping" else tensor.shape[0] != length
        if wrong:
            raise ValueError(f"{name} must have length {length}, got {tuple(tensor.shape)}")
    if batch.block_table_tensor.dim() != 2:
        raise ValueError(
            f"block_table_tensor must be [R, max_blocks], "
            f"got {tuple(batch.block_table_tensor.shape)}"
        )
    if batch.query_start_loc_cpu.device.type != "cpu":
        raise ValueError(
            f"query_start_loc_cpu must be on the host, got {batch.query_start_loc_cpu.device}"
        )


def _check_query_start_loc(batch: CommonAttentionMetadata) -> tuple[torch.Tensor, torch.Tensor]:
    starts = batch.query_start_loc.cpu()
    query_lens = starts[1:] - starts[:-1]
    if int(starts[0]) != 0:
        raise ValueError(f"query_start_loc must start at 0, got {int(starts[0])}")
    if len(query_lens) and int(query_lens.min()) < 0:
        row = int(query_lens.argmin())
        raise ValueError(
            f"query_start_loc must not decrease, got {starts[row : row + 2].tolist()} at {row}"
        )
    if int(starts[-1]) > batch.num_actual_tokens:
        raise ValueError(
            f"query_start_loc must end at or below num_actual_tokens "
            f"({batch.num_actual_tokens}), got {int(starts[-1])}"
        )
    if int(batch.query_start_loc_cpu[-1]) != int(starts[-1]):
        raise ValueError(
            f"query_start_loc_cpu must end where query_start_loc does ({int(starts[-1])}), "
            f"got {int(batch.query_start_loc_cpu[-1])}"
        )
    if len(query_lens) and int(query_lens.max()) > batch.max_query_len:
        raise ValueError(
            f"max_query_len must bound the query lengths ({int(query_lens.max())}), "
            f"got {batch.max_query_len}"
        )
    return query_lens, batch.seq_lens.cpu()
