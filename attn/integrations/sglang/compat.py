"""Differences between SGLang's versions; no other module knows a version."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any, Final

import torch

logger = logging.getLogger("sglang.srt.attn_backends")

FIRST: Final = (0, 5, 16)
LAST: Final = (0, 5, 23)
"""First and last version of SGLang that the plugin serves; it is tested with both."""

LISTED: Final = ("GptOss", "Gemma4")
"""How the classes of those models are named that SGLang serves by listed backends alone."""
NAMED: Final = (
    "attention_backend",
    "prefill_attention_backend",
    "decode_attention_backend",
    "speculative_draft_attention_backend",
)
"""SGLang's arguments that name backends."""
SPARSE: Final = "dsa"
"""SGLang's name of the backend of sparse latent layers."""
TAKES_OVER: Final = "ATTN_BACKENDS_SGLANG_DSA"
"""Variable of the environment that tells SGLang's processes that ``dsa`` is our backend: 1."""
ARGUMENTS: Final = "sglang.srt.arg_groups"
DRAFTS: Final = "sglang.srt.speculative.draft_utils.DraftBackendFactory"


def version() -> str:
    """The installed version of SGLang."""
    return installed_version("sglang")


def is_served(name: str) -> bool:
    """True for a version of SGLang that the plugin serves."""
    found = re.match(r"(\d+)\.(\d+)\.(\d+)", name)
    return found is not None and FIRST <= tuple(map(int, found.groups())) <= LAST


def _choices() -> Any:
    """The module that has the lists of SGLang's command line."""
    try:
        return importlib.import_module("sglang.srt.arg_groups.choices")
    except ModuleNotFoundError:
        # 0.5.16
        return importlib.import_module("sglang.srt.server_args")


def add_choice(name: str) -> bool:
    """Make SGLang's command line take a backend's name; False if it does already."""
    choices = _choices()
    if name in choices.ATTENTION_BACKEND_CHOICES:
        return False
    for group in ("", "draft_", "deterministic_", "radix_supported_deterministic_"):
        # 0.5.16 has no list for drafts.
        add = getattr(choices, f"add_{group}attention_backend_choices", None)
        if add is not None:
            add([name])
    return True


def register_factory(name: str, make: Callable[[Any], Any]) -> None:
    """Register the factory of a backend."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(name)(make)


def adjust_arguments(name: str) -> None:
    """Let the backend ``name`` pass for models that SGLang serves by other names alone.

    While SGLang adjusts its arguments to a model, two things are done:

    - For gpt-oss and Gemma 4, whose layers have sinks, and keys shared between layers, SGLang takes
      listed names only. ``name`` reads as ``triton`` there, which is on both lists.
    - Models of sparse latent layers (DSA) are served by the name ``dsa`` alone, which models and
      draft models test for. The arguments get that name, and :func:`serve_sparse_models` gives it
      our backend.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def adjust(original: Callable[..., Any], args: Any) -> Any:
        fields = [field for field in NAMED if getattr(args, field, None) == name]
        if not fields:
            return original(args)
        config = _model_config(args)
        if _is_sparse(config):
            decided: dict[str, Any] = dict.fromkeys(fields, SPARSE)
            for field in ("dsa_prefill_backend", "dsa_decode_backend"):
                if getattr(args, field) is None:
                    # The name decides the rows of the cache: of this one there are two formats,
                    # bf16 and fp8 with scales, on every GPU.
                    decided[field] = "flashmla_kv"
            _decide(args, decided)
            os.environ[TAKES_OVER] = "1"
            logger.info("attn-backends: takes over --attention-backend %s", SPARSE)
        if not (config.architectures or [""])[0].startswith(LISTED):
            return original(args)
        module = _names_module()
        real = module.attention_backends_of
        module.attention_backends_of = lambda view: tuple(
            "triton" if one == name else one for one in real(view)
        )
        try:
            return original(args)
        finally:
            module.attention_backends_of = real

    HookRegistry.register(_adjustment(), adjust, HookType.AROUND)


def _decide(args: Any, fields: Mapping[str, Any]) -> None:
    """Set arguments of SGLang while it adjusts them."""
    overrides = importlib.import_module(f"{ARGUMENTS}.overrides")
    declare = getattr(overrides, "declare_resolution", None)
    if declare is not None:
        declare(args, "attn_backends", **fields)
        return
    # 0.5.16 lets its arguments be written.
    for field, value in fields.items():
        setattr(args, field, value)


def _is_sparse(config: Any) -> bool:
    from sglang.srt.configs.model_config import is_deepseek_dsa

    return bool(is_deepseek_dsa(config))


def serve_sparse_models(make: Callable[[], Any], start: Callable[[Any], Any]) -> None:
    """Give the names of SGLang's backend of sparse latent layers to ours, where it was asked for.

    Args:
        make: gives the class of our backend, a subclass of SGLang's; called when a model needs it.
        start: takes a new backend and gives it back when it can serve.
    """
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    for name in (SPARSE, "nsa"):
        register_factory(name, partial(_make_sparse, ATTENTION_BACKENDS[name], make, start))


def _is_taken_over() -> bool:
    return os.environ.get(TAKES_OVER) == "1"


def _make_sparse(
    theirs: Callable[[Any], Any],
    make: Callable[[], Any],
    start: Callable[[Any], Any],
    runner: Any,
) -> Any:
    if not _is_taken_over():
        return theirs(runner)
    module: Any = importlib.import_module("sglang.srt.layers.attention.dsa_backend")
    # The backends of draft models are made by this name, after that of the model.
    ours = module.DeepseekSparseAttnBackend = make()
    return start(ours(runner))


def _adjustment() -> str:
    """Path of the function that adjusts SGLang's arguments to a model."""
    if importlib.util.find_spec(f"{ARGUMENTS}.model_hook") is None:
        # 0.5.16
        return "sglang.srt.server_args.ServerArgs._handle_model_specific_adjustments"
    return f"{ARGUMENTS}.model_hook.handle_model_specific_adjustments"


def _names_module() -> Any:
    """The module where that function looks up the names of the backends."""
    is_new = importlib.util.find_spec(f"{ARGUMENTS}.model_hook") is not None
    return importlib.import_module(f"{ARGUMENTS}.{'model_hook' if is_new else 'overrides'}")


def _model_config(args: Any) -> Any:
    """The configuration of the model that the arguments name."""
    overrides = importlib.import_module(f"{ARGUMENTS}.overrides")
    # 0.5.16 has a method.
    read = getattr(args, "get_model_config", None) or partial(overrides.model_config_of, args)
    return read().hf_config


def serve_latent_models(name: str) -> None:
    """Have layers of latent attention call the backend ``name`` with queries in two parts.

    Prompts without cached tokens come with keys and values for every head, all other steps with
    absorbed queries: this is what SGLang does for a name that it does not know. Prompts with cached
    tokens come with keys and values of the new tokens where the backend's ``expands`` says so.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.models.deepseek_common import utils

    if name not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)
    methods = handlers.AttnForwardMethod

    def handle(module: Any, batch: Any) -> Any:
        found = handlers.AttentionBackendRegistry.get_handler("triton")(module, batch)
        if found is not methods.MLA or not batch.forward_mode.is_extend_without_speculative():
            return found
        backend = handlers.get_attn_backend()
        # Where prefills and decodes have backends of their own.
        backend = getattr(backend, "prefill_backend", backend)
        expands = getattr(backend, "expands", None)
        if expands is None or handlers.is_in_tc_piecewise_cuda_graph():
            return found
        return methods.MHA if expands(module, batch) else found

    handlers.AttentionBackendRegistry.register(name, handle)


def serve_drafts(
    name: str, make_steps: Callable[[Any, int, int], Any], make_extend: Callable[[Any], Any]
) -> None:
    """Have SGLang make our backends for draft models, where it would refuse the name.

    The draft models of sparse models are SGLang's to make: see :func:`serve_sparse_models`.

    Args:
        name: of the backend.
        make_steps: makes the backends of a draft's decode steps, from the draft model's runner, the
            candidates that each step keeps, and the number of steps.
        make_extend: makes the backend of the step after a verify, from the draft model's runner.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def create_decode_backend(create: Callable[..., Any], factory: Any) -> Any:
        steps = factory.speculative_num_steps
        if steps <= 1 or _is_taken_over() or _draft_name(factory, "decode") != name:
            return create(factory)
        return make_steps(factory.draft_model_runner, factory.topk, steps)

    def create_draft_extend_backend(create: Callable[..., Any], factory: Any) -> Any:
        if _is_taken_over() or _draft_name(factory, _verify_phase(factory)) != name:
            return create(factory)
        return make_extend(factory.draft_model_runner)

    for hook in (create_decode_backend, create_draft_extend_backend):
        HookRegistry.register(f"{DRAFTS}.{hook.__name__}", hook, HookType.AROUND)


def _draft_name(factory: Any, phase: str) -> str | None:
    """Name of the backend that a draft model's phase asks for."""
    if factory.draft_attn_backend:
        return str(factory.draft_attn_backend)
    args = server_args(factory.draft_model_runner)
    name = getattr(args, f"{phase}_attention_backend") or args.attention_backend
    return None if name is None else str(name)


def _verify_phase(factory: Any) -> str:
    mode = server_args(factory.draft_model_runner).speculative_attention_mode
    return "decode" if mode == "decode" else "prefill"


def server_args(runner: Any) -> Any:
    """The engine's arguments."""
    return runner.server_args


@dataclass(frozen=True)
class Facts:
    """What the backends read of an engine and of a model."""

    page_size: int
    max_len: int
    """Most tokens of a request: the width of the table of slots."""
    max_reqs: int
    """Most requests of a step."""
    max_tokens: int
    """Most tokens of a step, as far as the engine says; a step may have more."""
    device: torch.device
    dtype: torch.dtype
    is_deterministic: bool
    draft_tokens: int
    """Tokens of a verify; 1 without speculation."""
    draft_topk: int
    """Candidates that each draft step keeps; 1 without speculation."""
    algorithm: str | None
    """Name of the speculation; None without."""
    dcp_size: int
    is_unified: bool
    """Layers of all kinds share one pool of virtual slots."""
    is_encoder_decoder: bool
    is_sparse: bool
    """Layers of latent attention attend lists of tokens (DSA)."""
    pooled_keys: int
    """Tokens that a key of the indexer stands for."""
    has_learned_sinks: bool
    """Sparse layers have sinks."""
    has_causal_decoders: bool
    """Layers that SGLang calls bidirectional decoders are causal all the same."""
    pool: str
    """Name of the cache's class."""


def facts_of(runner: Any) -> Facts:
    """Read an engine's settings.

    Args:
        runner: SGLang's ``ModelRunner``.
    """
    args, model = server_args(runner), runner.model_config
    slots = runner.req_to_token_pool.req_to_token
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    drafts, algorithm = args.speculative_num_draft_tokens, args.speculative_algorithm
    chunk = args.chunked_prefill_size or 0
    longest = slots.shape[1]
    # Row 0 is nobody's.
    reqs = max(slots.shape[0] - 1, 1)
    return Facts(
        page_size=int(runner.page_size),
        max_len=longest,
        max_reqs=reqs,
        max_tokens=max(chunk, 0) or max(int(args.max_prefill_tokens or 0), longest),
        device=torch.device(runner.device),
        dtype=runner.dtype,
        is_deterministic=bool(args.enable_deterministic_inference),
        draft_tokens=int(drafts or 1) if algorithm else 1,
        draft_topk=int(args.speculative_eagle_topk or 1) if algorithm else 1,
        algorithm=algorithm,
        dcp_size=int(getattr(args, "dcp_size", 1) or 1),
        is_unified=bool(getattr(args, "enable_unified_memory", False)),
        is_encoder_decoder=bool(model.is_encoder_decoder),
        is_sparse=getattr(config, "index_topk", None) is not None,
        pooled_keys=int(getattr(config, "index_kpool", 1) or 1),
        has_learned_sinks=bool(getattr(config, "learnable_sink", False)),
        has_causal_decoders=_has_causal_decoders(model),
        pool=type(runner.token_to_kv_pool).__name__,
    )


def _has_causal_decoders(model: Any) -> bool:
    """Whether a model is Gemma 3 without images.

    0.5.16 calls its layers bidirectional, for the sake of a model of embeddings.
    """
    config = getattr(model, "hf_config", None)
    names = getattr(config, "architectures", None) or [""]
    is_bidirectional = getattr(config, "use_bidirectional_attention", False)
    return names[0] == "Gemma3ForCausalLM" and not is_bidirectional


def window_slots(pool: Any) -> torch.Tensor | None:
    """Slot in the window pool of each slot, ``[slots]`` int64; None for a cache of one pool."""
    from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

    if not isinstance(pool, SWAKVPool):
        return None
    mapping: torch.Tensor | None = pool.full_to_swa_index_mapping
    if mapping is None:
        raise ValueError("the window pool has no mapping of slots yet")
    return mapping


def is_in_window_pool(pool: Any, layer_id: int) -> bool:
    """Whether a layer's keys are in the window pool of a cache of two."""
    mapping = getattr(pool, "layers_mapping", None)
    return mapping is not None and bool(mapping[layer_id][1])
