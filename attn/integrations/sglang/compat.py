"""Differences between SGLang's versions; no other module knows a version."""

from __future__ import annotations

import importlib
import importlib.util
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version as installed_version
from typing import Any, Final

import torch

FIRST: Final = (0, 5, 16)
LAST: Final = (0, 5, 23)
"""First and last version of SGLang that the plugin serves; it is tested with both."""

LISTED: Final = ("GptOss", "Gemma4")
"""How the classes of those models are named that SGLang serves by listed backends alone."""
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


def serve_listed_models(name: str) -> None:
    """Let the backend ``name`` pass for models whose backends SGLang lists by name.

    SGLang takes only listed backends for gpt-oss and Gemma 4, whose layers have sinks, and keys
    shared between layers. While it adjusts its arguments to such a model, ``name`` reads as
    ``triton``, which is on both lists; what it serves with afterwards is ``name``.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def adjust(original: Callable[..., Any], args: Any) -> Any:
        asked = (args.attention_backend, args.prefill_attention_backend)
        if name not in (*asked, args.decode_attention_backend):
            return original(args)
        if not _architecture(args).startswith(LISTED):
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


def _architecture(args: Any) -> str:
    """Class of a model; empty where SGLang fetches its configuration from elsewhere."""
    overrides = importlib.import_module(f"{ARGUMENTS}.overrides")
    # 0.5.16 has a method.
    read = getattr(args, "get_model_config", None) or partial(overrides.model_config_of, args)
    architectures = read().hf_config.architectures
    return str(architectures[0]) if architectures else ""


def serve_latent_models(name: str) -> None:
    """Have layers of latent attention call the backend ``name`` with queries in two parts.

    Prompts without cached tokens come with keys and values for every head, all other steps with
    absorbed queries. This is what SGLang does for a name that it does not know.
    """
    from sglang.srt.models.deepseek_common import utils

    if name not in utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS:
        utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.append(name)


def serve_drafts(
    name: str, make_steps: Callable[[Any, int, int], Any], make_extend: Callable[[Any], Any]
) -> None:
    """Have SGLang make our backends for draft models, where it would refuse the name.

    Args:
        name: of the backend.
        make_steps: makes the backends of a draft's decode steps, from the draft model's runner, the
            candidates that each step keeps, and the number of steps.
        make_extend: makes the backend of the step after a verify, from the draft model's runner.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    def create_decode_backend(create: Callable[..., Any], factory: Any) -> Any:
        steps = factory.speculative_num_steps
        if steps <= 1 or _draft_name(factory, "decode") != name:
            return create(factory)
        return make_steps(factory.draft_model_runner, factory.topk, steps)

    def create_draft_extend_backend(create: Callable[..., Any], factory: Any) -> Any:
        if _draft_name(factory, _verify_phase(factory)) != name:
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
    pool: str
    """Name of the cache's class."""


def facts_of(runner: Any) -> Facts:
    """Read an engine's settings.

    Args:
        runner: SGLang's ``ModelRunner``.
    """
    args, model = server_args(runner), runner.model_config
    slots = runner.req_to_token_pool.req_to_token
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
        is_sparse=_is_sparse(model),
        pool=type(runner.token_to_kv_pool).__name__,
    )


def _is_sparse(model: Any) -> bool:
    config = getattr(model, "hf_text_config", None) or getattr(model, "hf_config", None)
    return getattr(config, "index_topk", None) is not None


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
