"""Processes of one host as ranks of vLLM's groups, over gloo on the CPU."""

from __future__ import annotations

import multiprocessing
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from builders.splitkv.stripe import Stripe

RANKS = 2
SECONDS = 300
"""Longest that ranks may take."""


def run_ranks(folder: Path, config: Any, work: Callable[[int], Any]) -> list[Any]:
    """What ``work`` gives on every rank, in processes forked from this one.

    The processes have one tensor-parallel group, which is the group of decode context parallelism
    too.

    Args:
        folder: an empty folder, where the ranks meet and leave their results.
        config: vLLM's, of any engine.
        work: takes the rank; its result is stored by ``torch.save``.

    Raises:
        RuntimeError: a rank failed; the message has its traceback.
    """
    context = multiprocessing.get_context("fork")
    ranks = [
        context.Process(target=_run, args=(folder, rank, config, work), daemon=True)
        for rank in range(RANKS)
    ]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(SECONDS)
        if process.is_alive():
            process.kill()
    failures = [path.read_text() for path in sorted(folder.glob("failed_*"))]
    if failures or any(process.exitcode for process in ranks):
        raise RuntimeError("\n".join(failures) or "a rank took too long")
    return [torch.load(folder / f"result_{rank}", weights_only=False) for rank in range(RANKS)]


def give_ranks(config: Any, interleave: int = 1) -> None:
    """Set an engine's configuration to decode context parallelism over the ranks."""
    config.parallel_config.decode_context_parallel_size = RANKS
    config.parallel_config.cp_kv_cache_interleave_size = interleave


def localise(
    batch: Any,
    stripe: Stripe,
    query_lens: Sequence[int],
    seq_lens: Sequence[int],
    block_size: int,
) -> Any:
    """A batch of all tokens as a rank gets it: slots and lengths are those of its own tokens.

    Args:
        batch: vLLM's own object, changed in place.
        stripe: the tokens that the rank keeps.
        query_lens: new tokens of each request.
        seq_lens: length of each request.
        block_size: tokens of a block.
    """
    slots = []
    for row, (count, length) in enumerate(zip(query_lens, seq_lens, strict=True)):
        positions = torch.arange(length - count, length, dtype=torch.int32)
        place = stripe.local_positions(positions)
        at = place.clamp(min=0)
        mine = batch.block_table_tensor[row][at // block_size].long() * block_size
        slots.append(torch.where(place >= 0, mine + at % block_size, -1))
    batch.slot_mapping = torch.cat(slots)
    batch.dcp_local_seq_lens = stripe.local_lens(batch.seq_lens)
    return batch


def in_torch(out: torch.Tensor, lses: torch.Tensor, rank: int, *_: Any, **given: Any) -> Any:
    """vLLM's ``correct_attn_out``, whose kernel Triton's interpreter does not get: weigh a rank's
    output.

    Args:
        out: ``[T, H, D]``, written in place.
        lses: ``[ranks, T, H]``, natural logarithms.
        rank: the rank that ``out`` is of.
        given: ``is_lse_base_on_e`` must not be False.
    """
    assert given.get("is_lse_base_on_e", True)
    whole = torch.logsumexp(lses.float(), 0)
    share = torch.exp(lses[rank] - whole).nan_to_num()[..., None]
    return out.copy_(torch.where(share == 0, 0.0, out * share)), whole


def _run(folder: Path, rank: int, config: Any, work: Callable[[int], Any]) -> None:
    try:
        _join(folder, rank, config)
        torch.save(work(rank), folder / f"result_{rank}")
    except BaseException:
        (folder / f"failed_{rank}").write_text(traceback.format_exc())
        raise


def _join(folder: Path, rank: int, config: Any) -> None:
    """Make vLLM's groups as on a platform without GPUs, whatever platform is pretended."""
    import vllm.platforms as platforms
    from vllm import distributed
    from vllm.config import set_current_vllm_config
    from vllm.platforms.cpu import CpuPlatform

    pretended = platforms._current_platform
    platforms._current_platform = CpuPlatform()
    meeting = (folder / "meeting").as_uri()
    with set_current_vllm_config(config):
        distributed.init_distributed_environment(RANKS, rank, meeting, rank, "gloo")
        distributed.initialize_model_parallel(
            RANKS, decode_context_model_parallel_size=RANKS, backend="gloo"
        )
    platforms._current_platform = pretended
