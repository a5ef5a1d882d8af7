"""Block tables of latent decodes for trtllm-gen, whose kernel reads whole steps of blocks.

Tables are wide enough for that, and hold -1 past a request's last block.
"""

from __future__ import annotations

import math

import torch

from builders.buffers import GraphBuffers
from specs.base import cdiv

BURST = 64
"""Entries that a program of the fill kernel writes; a table's width is a multiple of it."""
KERNEL_TOKENS = 128
"""Tokens of a step of the vendor's kernel, which reads the table's entries of whole steps."""
NO_BLOCK = -1
"""Entry of a table past a request's last block."""
SEQ_LEN_FILL = 1
"""Keys of block 0 that a padding request of one token gets, since the vendor's kernels take no
request without keys."""


def table_width(max_model_len: int, page_size: int, burst: int = BURST) -> int:
    """Columns of a block table.

    These are the blocks of ``max_model_len`` tokens, rounded up to whole steps of the vendor's
    kernel and to whole bursts of the kernel that fills the table.

    Args:
        max_model_len: most keys of a request.
        page_size: tokens of a block.
        burst: entries that a program of the fill kernel writes.
    """
    unit = math.lcm(max(1, KERNEL_TOKENS // page_size), burst)
    return cdiv(max(max_model_len, 1), unit * page_size) * unit


class LatentTables:
    """Block tables and lengths of one KV cache group, allocated once for the declared limits.

    A CUDA graph may keep their addresses, and may contain the launch that fills them.
    """

    def __init__(
        self, max_num_seqs: int, max_model_len: int, page_size: int, device: torch.device | str
    ) -> None:
        """
        Args:
            max_num_seqs: most requests of a step.
            max_model_len: most keys of a request.
            page_size: tokens of a block.
            device: where the buffers live.
        """
        self.page_size = page_size
        self.width = table_width(max_model_len, page_size)
        self._buffers = GraphBuffers(device)
        self._buffers.declare("pages", (max_num_seqs, self.width), torch.int32, fill=NO_BLOCK)
        self._buffers.declare("kv_lens", (max_num_seqs,), torch.int32, fill=SEQ_LEN_FILL)

    def fill(
        self,
        block_table: torch.Tensor,
        query_lens: torch.Tensor,
        seq_lens: torch.Tensor,
        query_len: int = 1,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a step's tables; nothing is read back from the device.

        Args:
            block_table: ``[R, max_blocks]`` int32, any row stride; entries past a request's last
                block may be anything.
            query_lens: ``[R]`` int32, device; 0 for padding.
            seq_lens: ``[R]`` int32, device, this step's tokens included.
            query_len: query tokens that the vendor's kernel computes for each request; a padding
                request gets as many keys.

        Returns:
            ``[R, width]`` int32: blocks of each request; and ``[R]`` int32: keys of each request. A
            request without tokens or without keys gets keys of block 0.

        Raises:
            ValueError: there are more requests than declared.
        """
        reqs = len(seq_lens)
        pages = self._buffers.view("pages", reqs, self.width)
        kv_lens = self._buffers.view("kv_lens", reqs)
        if reqs:
            write = launch_latent_table if block_table.is_cuda else write_latent_table
            fill = max(SEQ_LEN_FILL, query_len)
            write(block_table, query_lens, seq_lens, pages, kv_lens, self.page_size, fill)
        return pages, kv_lens


def launch_latent_table(
    block_table: torch.Tensor,
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    fill: int = SEQ_LEN_FILL,
) -> None:
    """Fill tables and lengths by one kernel; its twin is :func:`write_latent_table`."""
    from builders.launch.launcher import launcher_of
    from builders.pages.device import latent_table_kernel

    reqs, width = pages.shape
    stride = block_table.stride(0)
    launch = launcher_of(latent_table_kernel, table_stride=stride, PAGE_SIZE=page_size, BURST=BURST)
    launch(
        (reqs, width // BURST),
        block_table,
        query_lens,
        seq_lens,
        pages,
        kv_lens,
        block_table.shape[1],
        width,
        fill,
    )


def write_latent_table(
    block_table: torch.Tensor,
    query_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    pages: torch.Tensor,
    kv_lens: torch.Tensor,
    page_size: int,
    fill: int = SEQ_LEN_FILL,
) -> None:
    """Fill tables and lengths in torch; the twin of ``latent_table_kernel``.

    Args:
        block_table: ``[R, max_blocks]`` int32.
        query_lens: ``[R]`` int32.
        seq_lens: ``[R]`` int32.
        pages: ``[R, width]`` int32, written.
        kv_lens: ``[R]`` int32, written.
        page_size: tokens of a block.
        fill: keys that a request without keys or without tokens gets.
    """
    live = (query_lens > 0) & (seq_lens > 0)
    kv_lens.copy_(torch.where(live, seq_lens, fill))
    used = torch.div(kv_lens + page_size - 1, page_size, rounding_mode="floor")
    used = used.clamp(max=block_table.shape[1])
    column = torch.arange(pages.shape[1], device=block_table.device)
    entries = block_table[:, column.clamp(max=block_table.shape[1] - 1)]
    entries = torch.where(live[:, None], entries, 0)
    pages.copy_(torch.where(column < used[:, None], entries, NO_BLOCK))
