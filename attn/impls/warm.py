"""Warm-up: running small steps, so that no kernel is compiled while an engine serves."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run_compiled(run_steps: Callable[[], None], device: torch.device) -> None:
    """Run steps; on a GPU, first compile all kernels that they launch, in parallel.

    Where a caller collects launches, the steps are run once, for its list.

    Args:
        run_steps: runs every step. It is called twice on a GPU; the first call only collects the
            launches of the library's own kernels.
        device: the device that the steps run on.
    """
    from builders.launch.call import collected, collected_calls, compile_calls

    if device.type == "cuda" and collected.get() is None:
        with collected_calls() as calls:
            run_steps()
        compile_calls(calls, device)
    run_steps()
