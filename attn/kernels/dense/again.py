"""Forwards like one before them, launched again for as little of the host's time as there is.

Of a step without host work to hide behind, each layer's forward comes after the one before it.
What a launch depends on of its tensors torch compares by one call, as it does for compiled code,
which costs what two or three attributes do of the ten that are read otherwise. Where torch has no
such call,
forwards are read as they are otherwise (:meth:`attn.kernels.dense.launcher.DenseLauncher.attend`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from builders.launch.call import collected

if TYPE_CHECKING:
    from builders.dense.record import AloneStep, ReadStep
    from builders.launch.launcher import Repeat
    from builders.splitkv.record import PrefillPlan


Launched: TypeAlias = "Repeat | PrefillAgain"
"""What makes a launch again."""


class PrefillAgain(Protocol):
    """Prefill launches made again."""

    def launch(
        self,
        plan: PrefillPlan,
        query: torch.Tensor,
        given: tuple[tuple[Any, ...], ...],
        lengths: tuple[Any, ...],
    ) -> bool:
        """See :class:`attn.kernels.dense.hopper_prefill.launch.RepeatedPrefill`."""


class ForwardAgain:
    """Forwards of one layer over one cache, of steps with the same kind of rows alone, that differ
    from one that was launched in numbers of rows and addresses.
    """

    def __init__(
        self,
        step: AloneStep,
        launched: Launched,
        is_alike: Callable[..., bool],
        others: Sequence[torch.Tensor],
        rest: tuple[int | None, ...],
    ) -> None:
        """
        Args:
            step: of that forward.
            launched: what made its launch.
            is_alike: as :func:`alike` makes it of its query and output, and what else it was given.
            others: as of a call.
            rest: likewise.
        """
        self._num_others = len(others)
        self._missing = [address is None for address in rest]
        self._likeness = step.likeness
        self._launch: Callable[..., bool] = launched.launch
        self._is_alike = is_alike

    def __call__(
        self,
        read: ReadStep,
        query: torch.Tensor,
        output: torch.Tensor,
        others: Sequence[torch.Tensor],
        rest: tuple[int | None, ...],
    ) -> bool:
        """Enqueue a forward; False, and nothing is done, where it is not like that one.

        Args:
            read: of the builder's record.
            query: ``[T, H, D]``.
            output: ``[T, H, Dv]`` or ``[T, H * Dv]``.
            others: what else it is given.
            rest: addresses of sinks, slopes, LSE, the output's scale and the cache's scales; None
                of those that there are not.
        """
        alone = read.alone
        if alone is None:
            return False
        likeness, least, is_prefill, prefill, programs, given = alone
        tokens = query.size(0)
        if (
            likeness != self._likeness
            or tokens < least
            or output.size(0) < least
            or len(others) != self._num_others
            or (others and [address is None for address in rest] != self._missing)
            or not self._is_alike(query, output, *others)
            or collected.get() is not None
        ):
            return False
        rows = (query.data_ptr(), tokens, output.data_ptr())
        if is_prefill:
            return self._launch(prefill, query, (rows, read.table, rest), given)
        return self._launch(programs, (rows, read.table, rest, given))


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Whether as many others, no tensor twice, differ from these in place and, the first two, in
    their number of rows only; None where torch does not tell.
    """
    try:
        from torch._C._dynamo.guards import TensorGuards

        # A list for each tensor, in which what may differ is None; torch's types say otherwise.
        sizes: list[Any] = [[*tensor.shape] for tensor in tensors]
        strides: list[Any] = [[*tensor.stride()] for tensor in tensors]
        for size in sizes[:2]:
            size[0] = None
        guards = TensorGuards(*tensors, dynamic_dims_sizes=sizes, dynamic_dims_strides=strides)
        check: Callable[..., bool] = guards.check
        return check if check(*tensors) else None
    except (ImportError, AttributeError, LookupError, TypeError, ValueError, RuntimeError):
        return None
