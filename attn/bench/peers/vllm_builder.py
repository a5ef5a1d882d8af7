"""The metadata builder of vLLM's FLASHINFER on a case's batch, as vLLM makes and calls it."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, Final
from unittest import mock

import torch

from attn.bench.cases.case import MODEL_DTYPE, KernelCase
from attn.bench.engine.engine import MODEL
from attn.bench.measure.ours import MAX_MODEL_LEN, MAX_NUM_BATCHED_TOKENS, MAX_NUM_SEQS
from attn.bench.peers.dense import Refusal
from attn.bench.results.reasons import describe
from attn.bench.results.results import Status
from builders.batch import CommonAttentionMetadata

PREFIX: Final = "model.layers.0.self_attn.attn"


def vllm_build(
    case: KernelCase, batch: CommonAttentionMetadata, uses_xqa: bool
) -> Callable[[], object] | Refusal:
    """A call that builds a step's metadata in vLLM, or a refusal with the reason.

    Args:
        case: a case of decodes with the heads of Llama-3.1-8B.
        batch: batch of the case.
        uses_xqa: True where vLLM decodes by XQA, which needs no plan; False where it decodes by
            FlashInfer's wrapper, which needs one.
    """
    device = batch.seq_lens.device
    if device.type != "cuda":
        return Refusal(Status.UNAVAILABLE, f"needs a CUDA device, not {device.type}")
    try:
        import_module("vllm")
        import_module("flashinfer")
    except Exception as error:
        return Refusal(Status.UNAVAILABLE, f"vLLM's builder: {describe(error)}")
    try:
        builder = _builder_of(case, batch, uses_xqa)
        common = _common_of(batch)
    except Exception as error:
        return Refusal(Status.FAILED, f"vLLM's builder: {describe(error)}")
    if builder.use_trtllm_decode_attention != uses_xqa:
        return Refusal(Status.UNSUPPORTED, "this vLLM does not decode so here")
    return lambda: builder.build(0, common)


def _builder_of(case: KernelCase, batch: CommonAttentionMetadata, uses_xqa: bool) -> Any:
    """VLLM's builder after a first build, in which it looks up the configuration and keeps it.

    Later builds do not need vLLM's current configuration, which is set in this function alone.
    """
    config_of: Any = import_module("vllm.config")
    layers: Any = import_module("vllm.model_executor.layers.attention")
    found: Any = import_module("vllm.v1.attention.backends.flashinfer")
    config = _config_of(config_of, case, uses_xqa)
    # Without the patch vLLM takes XQA for missing unless it can reach a server that hosts kernels
    # for other GPUs.
    taken = mock.patch(
        "vllm.utils.flashinfer.supports_trtllm_attention",
        side_effect=lambda is_prefill=False: not is_prefill,
    )
    # vLLM makes layers in torch's default dtype, which vLLM's loader sets to the model's.
    default = torch.get_default_dtype()
    torch.set_default_dtype(MODEL_DTYPE.torch)
    try:
        with config_of.set_current_vllm_config(config), taken:
            layer = layers.Attention(
                case.num_heads,
                case.head_size,
                case.scale,
                num_kv_heads=case.num_kv_heads,
                cache_config=config.cache_config,
                prefix=PREFIX,
            )
            spec = layer.get_kv_cache_spec(config)
            device = batch.seq_lens.device
            builder = found.FlashInferMetadataBuilder(spec, [PREFIX], config, device)
            builder.build(0, _common_of(batch))
            return builder
    finally:
        torch.set_default_dtype(default)


def _config_of(config_of: Any, case: KernelCase, uses_xqa: bool) -> Any:
    """VLLM's configuration of the benchmark's model, with the limits that our builder gets."""
    limits = {
        "max_model_len": min(MAX_MODEL_LEN, MODEL["max_position_embeddings"]),
        "max_num_seqs": MAX_NUM_SEQS,
        "max_num_batched_tokens": MAX_NUM_BATCHED_TOKENS,
    }
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
        model = config_of.ModelConfig(
            model=folder,
            skip_tokenizer_init=True,
            dtype=str(MODEL_DTYPE.torch).removeprefix("torch."),
            max_model_len=limits["max_model_len"],
        )
        return config_of.VllmConfig(
            model_config=model,
            cache_config=config_of.CacheConfig(block_size=case.block_size, cache_dtype="auto"),
            scheduler_config=config_of.SchedulerConfig(is_encoder_decoder=False, **limits),
            attention_config=config_of.AttentionConfig(
                backend="FLASHINFER", use_trtllm_attention=None if uses_xqa else False
            ),
        )


def _common_of(batch: CommonAttentionMetadata) -> Any:
    """The batch as vLLM's runner passes it, with lengths on the host too."""
    made: Any = import_module("vllm.v1.attention.backend").CommonAttentionMetadata
    lens = batch.seq_lens_cpu_upper_bound
    return made(
        query_start_loc=batch.query_start_loc,
        query_start_loc_cpu=batch.query_start_loc_cpu,
        seq_lens=batch.seq_lens,
        num_reqs=batch.num_reqs,
        num_actual_tokens=batch.num_actual_tokens,
        max_query_len=batch.max_query_len,
        max_seq_len=batch.max_seq_len,
        block_table_tensor=batch.block_table_tensor,
        slot_mapping=batch.slot_mapping,
        seq_lens_cpu_upper_bound=lens,
        _seq_lens_cpu=lens,
    )
