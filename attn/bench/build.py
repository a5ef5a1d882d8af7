"""``attn bench build``: CPU time of building a step's metadata."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch

from attn.device import detect_device
from attn.registry import AttentionBackendEnum
from attn.selector import import_problem
from builders.batch import CommonAttentionMetadata
from specs.engine import EngineConfig
from specs.kv_cache import AnyKVCacheSpec, FullAttentionSpec, MLAAttentionSpec

TARGET_MICROSECONDS = 50.0
"""Target for a build of 256 decodes, without the tensor copies that every build needs."""


def bench_build(num_reqs: int, repeats: int) -> Iterator[str]:
    """Time builds of decodes and yield a line for each backend that can be imported here.

    Args:
        num_reqs: decodes in the batch.
        repeats: timed builds; the median and the 99th percentile are reported.
    """
    device = detect_device()
    config = EngineConfig(max_model_len=8192, max_num_seqs=num_reqs, num_heads=32, index_topk=2048)
    seq_len, block_size = 4096, 16
    blocks = seq_len // block_size
    table = torch.arange(1, num_reqs * blocks + 1, dtype=torch.int32).view(num_reqs, blocks)
    batch = CommonAttentionMetadata.from_lengths(
        [1] * num_reqs, [seq_len] * num_reqs, table.to(device.torch_type), block_size
    )
    yield f"metadata build, {num_reqs} decodes, {device.name}, {repeats} builds"
    for member in AttentionBackendEnum:
        if member.missing() or import_problem(member) is not None:
            continue
        backend = member.get_class()
        if not backend.supports_device(device):
            continue
        if backend.unavailable_reason() is not None:
            continue
        spec: AnyKVCacheSpec
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128)
        if backend.is_mla():
            spec = MLAAttentionSpec(block_size=block_size)
        builder = backend.get_builder_cls()(spec, ["layers.0"], config, device.torch_type)
        times = []
        for _ in range(repeats + 20):
            begin = time.perf_counter_ns()
            builder.build(0, batch)
            times.append((time.perf_counter_ns() - begin) / 1000)
        times = sorted(times[20:])
        median, tail = times[len(times) // 2], times[int(len(times) * 0.99)]
        verdict = "met" if median <= TARGET_MICROSECONDS else "NOT met"
        yield (
            f"{member.name:22} median {median:7.1f} us   p99 {tail:7.1f} us   "
            f"target {TARGET_MICROSECONDS:.0f} us {verdict}"
        )
