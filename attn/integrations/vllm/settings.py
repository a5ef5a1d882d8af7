"""The plugin's environment variables: no other module reads or checks them."""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar

from specs.engine import DecodeKernel, Kernels, PrefillKernel

PREFIX: Final = "ATTN_VLLM_"
BACKEND_VARIABLE: Final = "ATTN_VLLM_BACKEND"
"""Our backends, or other packages', for ``--attention-backend CUSTOM``, separated by commas: at
most one for each kind of layer (dense, latent, sparse). A kind without gets the best for the
device."""
OVERRIDE_VARIABLE: Final = "ATTN_VLLM_OVERRIDE"
"""Names in vLLM's registry, separated by commas, that our backends of the same name replace."""
PREFILL_VARIABLE: Final = "ATTN_VLLM_PREFILL_KERNEL"
"""Kernel of requests with many new tokens: ``auto``, ``triton`` or ``hopper``."""
DECODE_VARIABLE: Final = "ATTN_VLLM_DECODE_KERNEL"
"""Kernel of requests with few new tokens: ``auto``, ``triton`` or ``hopper``."""
AHEAD_VARIABLE: Final = "ATTN_VLLM_COMPILE_AHEAD"
"""``0``: no process compiles our kernels while vLLM loads the model; ``1``, the default: one does.
"""
QUERIES_VARIABLE: Final = "ATTN_VLLM_FP8_MLA_QUERIES"
"""``1``: latent decodes over an e4m3 cache may round queries to e4m3
(``EngineConfig.fp8_mla_queries``); ``0``, the default: they do not."""
VARIABLES: Final = (
    BACKEND_VARIABLE,
    OVERRIDE_VARIABLE,
    PREFILL_VARIABLE,
    DECODE_VARIABLE,
    AHEAD_VARIABLE,
    QUERIES_VARIABLE,
)

RAY_VARIABLE: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""vLLM's list of further variables for its Ray workers, which get all that start with ``VLLM_``."""

_Kernel = TypeVar("_Kernel", PrefillKernel, DecodeKernel)


def check() -> None:
    """Check the variables whose values name no backend.

    Raises:
        ValueError: a variable with our prefix is unknown, or a kernel's name is.
    """
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise ValueError(f"{PREFIX}* variables are {', '.join(VARIABLES)}, got {name}")
    prefill_kernel()
    decode_kernel()
    compiles_ahead()
    fp8_mla_queries()


def compiles_ahead() -> bool:
    """Whether a process compiles our kernels while vLLM loads the model.

    Raises:
        ValueError: the variable's value is neither 0 nor 1.
    """
    return _switched(AHEAD_VARIABLE, "1")


def fp8_mla_queries() -> bool:
    """Whether latent decodes over an e4m3 cache may round queries to e4m3.

    Raises:
        ValueError: the variable's value is neither 0 nor 1.
    """
    return _switched(QUERIES_VARIABLE, "0")


def _switched(variable: str, default: str) -> bool:
    named = os.environ.get(variable) or default
    if named not in ("0", "1"):
        raise ValueError(f"{variable} must be 0 or 1, got {named!r}")
    return named == "1"


_at_start: dict[str, str] = {}
"""This process's variables when the plugin was registered."""


def keep_environment() -> None:
    """Keep this process's variables as they are now; only the first call does something.

    vLLM changes some of them later, for what it compiles.
    """
    if not _at_start:
        _at_start.update(os.environ)


def environment_at_start() -> dict[str, str]:
    """The variables that :func:`keep_environment` kept; today's where it was not called."""
    return dict(_at_start or os.environ)


def backends() -> list[str]:
    """Names of our backends for ``CUSTOM``; the best for the device stand for kinds without."""
    return _listed(BACKEND_VARIABLE)


def overrides() -> list[str]:
    """Names in vLLM's registry that our backends shall replace."""
    return _listed(OVERRIDE_VARIABLE)


def _listed(variable: str) -> list[str]:
    names = os.environ.get(variable, "").split(",")
    return [name.strip() for name in names if name.strip()]


def kernels() -> Kernels:
    """The kernels that the environment names, for dense and latent layers alike.

    Raises:
        ValueError: a variable names none.
    """
    return Kernels.own(prefill_kernel(), decode_kernel())


def prefill_kernel() -> PrefillKernel:
    """Kernel of requests with many new tokens.

    Raises:
        ValueError: the variable's value is no kernel's name.
    """
    return _named(PREFILL_VARIABLE, PrefillKernel.AUTO)


def decode_kernel() -> DecodeKernel:
    """Kernel of requests with few new tokens.

    Raises:
        ValueError: the variable's value is no kernel's name.
    """
    return _named(DECODE_VARIABLE, DecodeKernel.AUTO)


def _named(variable: str, default: _Kernel) -> _Kernel:
    choices, named = type(default), os.environ.get(variable) or default.value
    if named not in list(choices):
        raise ValueError(f"{variable} must be one of {', '.join(choices)}, got {named!r}")
    return choices(named)


def kernel_reasons(capability: Any) -> list[str]:
    """Why a device cannot run the kernels that the environment names.

    Args:
        capability: vLLM's compute capability of the device; None for a device without one.
    """
    named = {PREFILL_VARIABLE: prefill_kernel(), DECODE_VARIABLE: decode_kernel()}
    if capability is None or capability.major == 9:
        return []
    return [
        f"{variable}={kernel.value} not supported (needs compute capability 9.0, got "
        f"{capability.major}.{capability.minor})"
        for variable, kernel in named.items()
        if kernel.value == "hopper"
    ]


def pass_on() -> None:
    """Add our variables to the list of variables that vLLM passes on to its Ray workers.

    A worker without them would choose other kernels than its peers.
    """
    listed = [name for name in os.environ.get(RAY_VARIABLE, "").split(",") if name.strip()]
    missing = [name for name in VARIABLES if name in os.environ and name not in listed]
    if missing:
        os.environ[RAY_VARIABLE] = ",".join([*listed, *missing])
