"""What vLLM would do here with this library; vLLM itself is not imported."""

from __future__ import annotations

import os
from typing import Final

from attn.bench.results.origin import installed
from attn.cli.doctor.machine import plugin_is_registered
from attn.integrations.vllm import settings
from attn.integrations.vllm.plugin import FIRST, LAST, custom_paths, is_served
from specs.base import Spec
from specs.devices import Device

PLUGINS_VARIABLE: Final = "VLLM_PLUGINS"


class Vllm(Spec):
    """vLLM and the plugin."""

    version: str | None
    """None where vLLM is not installed."""
    is_served: bool
    """The plugin serves this version."""
    entry_point: bool
    """vLLM finds the plugin."""
    custom: dict[str, str]
    """Import path of the class that ``--attention-backend CUSTOM`` takes, by kind of layer."""
    replaced: tuple[str, ...]
    """Names of vLLM's backends that ours replace."""
    variables: dict[str, str]
    """Variables of the plugin that are set."""
    problems: tuple[str, ...]
    """Why ``CUSTOM`` would not work, or not as meant."""


def find_vllm(device: Device) -> Vllm:
    """What vLLM on a device would use of this library.

    Args:
        device: the device that vLLM would run on.
    """
    version, entry = installed("vllm"), plugin_is_registered()
    served = version is not None and is_served(version)
    custom: dict[str, str] = {}
    problems = []
    try:
        custom = custom_paths(device.kind)
    except ValueError as error:
        problems.append(str(error))
    if version is None:
        problems.append("vllm is not installed: pip install vllm")
    elif not served:
        first, last = (".".join(map(str, one)) for one in (FIRST, LAST))
        problems.append(f"the plugin serves vLLM {first} to {last}, this is {version}")
    if not entry:
        problems.append("the plugin's entry point is not installed: pip install . (in a checkout)")
    allowed = os.environ.get(PLUGINS_VARIABLE)
    if allowed is not None and "attn_backends" not in allowed.split(","):
        problems.append(f"{PLUGINS_VARIABLE}={allowed} leaves attn_backends out")
    return Vllm(
        version=version,
        is_served=served,
        entry_point=entry,
        custom=custom,
        replaced=tuple(settings.overrides()),
        variables={name: os.environ[name] for name in settings.VARIABLES if name in os.environ},
        problems=tuple(problems),
    )
