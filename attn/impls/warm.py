"""Running small steps so that no kernel is compiled while an engine serves."""

from __future__ import annotations

from collections.abc import Callable

import torch


def run_compiled(run_steps: Callable[[], None], device: torch.device) -> None:
    """Run steps, on a GPU after compiling all that they launch side by side.

    Args:
        run_steps: runs every step; twice on a GPU, first without launches of the library's own.
        device: that they run on.
    """
    if device.type == "cuda":
        from builders.launch.call import collected_calls, compile_calls

        with collected_calls() as calls:
            run_steps()
        compile_calls(calls, device)
    run_steps()
