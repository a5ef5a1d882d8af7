"""What the environment says to the plugin: every variable is read and checked here alone."""

from __future__ import annotations

import os
from typing import Any, Final, TypeVar

from specs.engine import DecodeKernel, Kernels, PrefillKernel

PREFIX: Final = "ATTN_VLLM_"
BACKEND_VARIABLE: Final = "ATTN_VLLM_BACKEND"
"""Our backend that ``--attention-backend CUSTOM`` stands for; unset is the best of the device."""
OVERRIDE_VARIABLE: Final = "ATTN_VLLM_OVERRIDE"
"""Members of vLLM's registry, separated by commas, that ours of the same name replace."""
PREFILL_VARIABLE: Final = "ATTN_VLLM_PREFILL_KERNEL"
"""Names the kernel of requests with many new tokens: ``auto``, ``triton`` or ``hopper``."""
DECODE_VARIABLE: Final = "ATTN_VLLM_DECODE_KERNEL"
"""Names the kernel of the other requests, in the same words."""
VARIABLES: Final = (BACKEND_VARIABLE, OVERRIDE_VARIABLE, PREFILL_VARIABLE, DECODE_VARIABLE)

RAY_VARIABLE: Final = "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY"
"""vLLM's list of variables, beyond those of its own prefix, that its Ray workers get."""

_Kernel = TypeVar("_Kernel", PrefillKernel, DecodeKernel)


def check() -> None:
    """Check every variable that needs no registry.

    Raises:
        ValueError: a variable with our prefix that is none of ours, or a kernel that there is not.
    """
    for name in sorted(os.environ):
        if name.startswith(PREFIX) and name not in VARIABLES:
            raise ValueError(f"{PREFIX}* variables are {', '.join(VARIABLES)}, got {name}")
    prefill_kernel()
    decode_kernel()


def backend() -> str | None:
    """What ``CUSTOM`` is to be; None leaves it to the device."""
    return os.environ.get(BACKEND_VARIABLE) or None


def overrides() -> list[str]:
    """Members of vLLM's registry that are to be ours."""
    names = os.environ.get(OVERRIDE_VARIABLE, "").split(",")
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
        ValueError: the variable names none.
    """
    return _named(PREFILL_VARIABLE, PrefillKernel.AUTO)


def decode_kernel() -> DecodeKernel:
    """Kernel of the other requests.

    Raises:
        ValueError: the variable names none.
    """
    return _named(DECODE_VARIABLE, DecodeKernel.AUTO)


def _named(variable: str, default: _Kernel) -> _Kernel:
    choices, named = type(default), os.environ.get(variable) or default.value
    if named not in list(choices):
        raise ValueError(f"{variable} must be one of {', '.join(choices)}, got {named!r}")
    return choices(named)


def kernel_reasons(capability: Any) -> list[str]:
    """Why a device cannot have the kernels that the environment names.

    Args:
        capability: vLLM's compute capability of the device; None without one.
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
    """Have vLLM's Ray workers get our variables: they get what starts with ``VLLM_``, and what this
    list names. A worker without them would choose other kernels than its peers.
    """
    listed = [name for name in os.environ.get(RAY_VARIABLE, "").split(",") if name.strip()]
    missing = [name for name in VARIABLES if name in os.environ and name not in listed]
    if missing:
        os.environ[RAY_VARIABLE] = ",".join([*listed, *missing])
