"""Slots and CSR page lists from block tables: torch operations that do not wait for the device."""

from __future__ import annotations

from typing import NamedTuple

import torch

from specs.sentinels import PAD_SLOT_ID


def compute_slot_mapping(
    block_table: torch.Tensor,
    query_start_loc: torch.Tensor,
    seq_lens: torch.Tensor,
    num_tokens: int,
    block_size: int,
) -> torch.Tensor:
    """Slot of every new token of a decoder batch.

    Args:
        block_table: ``[R, max_blocks]`` int32.
        query_start_loc: ``[R + 1]`` int32.
        seq_lens: ``[R]`` int32, this step's tokens included.
        num_tokens: tokens of the batch on the host, padding included.
        block_size: tokens per block.

    Returns:
        ``[num_tokens]`` int64; -1 for tokens past ``query_start_loc[-1]``, for tokens of rows with
        no KV length, and for positions past the table.
    """
    tokens = torch.arange(num_tokens, dtype=torch.int32, device=block_table.device)
    if block_table.shape[0] == 0 or block_table.shape[1] == 0:
        return torch.full_like(tokens, PAD_SLOT_ID, dtype=torch.int64)
    rows = torch.searchsorted(query_start_loc[1:].contiguous(), tokens, right=True)
    is_token = rows < block_table.shape[0]
    rows = rows.clamp(max=block_table.shape[0] - 1)
    query_lens = query_start_loc[1:] - query_start_loc[:-1]
    context = seq_lens - query_lens
    positions = (context[rows] + tokens - query_start_loc[rows]).long()
    # A token past the table's end has no slot: its column, once clamped, is another token's.
    is_token &= (positions >= 0) & (positions < block_table.shape[1] * block_size)
    column = (positions // block_size).clamp(0, block_table.shape[1] - 1)
    slots = block_table[rows, column].long() * block_size + positions % block_size
    return torch.where(is_token, slots, PAD_SLOT_ID)


class PagedKV(NamedTuple):
    """A block table in CSR form."""

    indptr: torch.Tensor
    """``[R + 1]`` int32: request i owns ``indices[indptr[i] : indptr[i + 1]]``."""
    indices: torch.Tensor
    """``[>= sum of pages]`` int32 physical blocks; entries past ``indptr[-1]`` are padding (0)."""
    last_page_len: torch.Tensor
    """``[R]`` int32: tokens in the last page, 1 to block size; 0 for an empty request."""


def block_table_to_csr(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    skipped: torch.Tensor | None = None,
) -> PagedKV:
    """Page lists of every request, sized ``R * max_blocks`` so that the host reads no length.

    Args:
        block_table: ``[R, max_blocks]`` int32; entries past a row's last page may be anything.
        seq_lens: ``[R]`` int32.
        block_size: tokens per block.
        skipped: ``[R]`` int32: leading pages of each request that are left out, at most all of
            them; None leaves none out.
    """
    num_reqs, width = block_table.shape
    pages = torch.div(seq_lens + block_size - 1, block_size, rounding_mode="floor")
    # Clamped, so that a length beyond the table does not lead a reader past the end of the list.
    pages = pages.clamp(max=width)
    listed = pages if skipped is None else pages - skipped
    indptr = torch.zeros(num_reqs + 1, dtype=torch.int32, device=block_table.device)
    torch.cumsum(listed, 0, out=indptr[1:])
    columns = torch.arange(width, device=block_table.device)
    used = columns < pages[:, None]
    places = indptr[:-1, None] + columns
    if skipped is not None:
        used &= columns >= skipped[:, None]
        places = places - skipped[:, None]
    # All unused entries are written to one cell past the end, which is cut off.
    target = torch.where(used, places, num_reqs * width)
    indices = torch.zeros(num_reqs * width + 1, dtype=torch.int32, device=block_table.device)
    indices.scatter_(0, target.flatten().long(), block_table.flatten())
    last = seq_lens - (pages - 1) * block_size
    last_page_len = torch.where(listed > 0, last, 0).to(torch.int32)
    return PagedKV(indptr, indices[:-1], last_page_len)


def split_blocks(
    block_table: torch.Tensor, manager_block_size: int, kernel_block_size: int
) -> torch.Tensor:
    """Turn a table of blocks of ``manager_block_size`` tokens into a table of kernel blocks.

    With f kernel blocks in a block of the manager, its physical block b is the kernel blocks
    ``b * f`` to ``b * f + f - 1``.

    Args:
        block_table: ``[R, max_blocks]`` int32.
        manager_block_size: a multiple of ``kernel_block_size``.
        kernel_block_size: tokens per kernel block.

    Returns:
        ``[R, max_blocks * f]`` int32.
    """
    if manager_block_size % kernel_block_size:
        raise ValueError(
            f"manager block size {manager_block_size} is not a multiple of the kernel's "
            f"{kernel_block_size}"
        )
    factor = manager_block_size // kernel_block_size
    if factor == 1:
        return block_table
    offsets = torch.arange(factor, dtype=block_table.dtype, device=block_table.device)
    return (block_table[:, :, None] * factor + offsets).flatten(1)


def check_block_table(
    block_table: torch.Tensor,
    seq_lens: torch.Tensor,
    block_size: int,
    num_blocks: int | None = None,
) -> None:
    """Check that lengths fit their rows and that used entries lie in the cache; reads the device.

    Args:
        block_table: ``[R, max_blocks]`` int32; unused entries may be anything.
        seq_lens: ``[R]`` int32.
        block_size: tokens per block.
        num_blocks: blocks of the cache; None leaves the ids unchecked.

    Raises:
        ValueError: a length or an entry does not; the message names row, column and value.
    """
    table, lens = block_table.cpu(), seq_lens.cpu().long()
    used = (lens + block_size - 1) // block_size
    if len(used) and int(used.max()) > table.shape[1]:
        row = int(used.argmax())
        raise ValueError(
            f"block_table_tensor has {table.shape[1]} columns; request {row} of length "
            f"{int(lens[row])} needs {int(used[row])} blocks of {block_size}"
        )
    if num_blocks is None:
        return
    columns = torch.arange(table.shape[1])
    outside = (columns < used[:, None]) & ((table < 0) | (table >= num_blocks))
    if bool(outside.any()):
        row, column = (int(index) for index in torch.nonzero(outside)[0])
        raise ValueError(
            f"block_table_tensor[{row}, {column}] must be in [0, {num_blocks}), "
            f"got {int(table[row, column])}"
        )


def check_slots(
    slot_mapping: torch.Tensor, block_size: int | None = None, num_blocks: int | None = None
) -> None:
    """Check that every slot is -1 or lies inside the cache; reads the device.

    Args:
        slot_mapping: ``[T]`` int64.
        block_size: tokens per block; with None only the sign is checked.
        num_blocks: blocks of the cache; with None only the sign is checked.

    Raises:
        ValueError: a slot does not; the message names token and value.
    """
    slots = slot_mapping.cpu()
    if not len(slots):
        return
    if int(slots.min()) < PAD_SLOT_ID:
        raise ValueError(
            f"slot_mapping must hold {PAD_SLOT_ID} or a slot, got {int(slots.min())} "
            f"at token {int(slots.argmin())}"
        )
    if block_size is None or num_blocks is None:
        return
    if int(slots.max()) >= num_blocks * block_size:
        raise ValueError(
            f"slot_mapping must be below {num_blocks * block_size} ({num_blocks} blocks of "
            f"{block_size}), got {int(slots.max())} at token {int(slots.argmax())}"
        )
