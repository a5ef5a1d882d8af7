"""Forwards like one before them, launched again for as little of the host's time as there is.

Of a step without host work to hide behind, each layer's forward comes after the one before it.
What a launch depends on of its tensors torch compares by one call, as it does for compiled code:
an attribute of a tensor costs as much as that, and there are twenty. Where torch has no such call,
forwards are read as they are otherwise (:meth:`attn.kernels.dense.DenseLauncher.attend`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import torch

from builders.kernel_calls import collected

if TYPE_CHECKING:
    from builders.fast_launch import Repeat
    from builders.split_plan import PrefillPlan
    from builders.triton_attn import TritonAttentionMetadata


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
        """See :class:`attn.kernels.hopper.launch.RepeatedPrefill`."""


class ForwardAgain:
    """Forwards of one layer over one cache, of steps with the same kind of rows alone, that differ
    from one that was launched in numbers of rows and addresses.
    """

    def __init__(
        self,
        step: TritonAttentionMetadata,
        launched: Launched,
        is_alike: Callable[..., bool],
    ) -> None:
        """
        Args:
            step: of that forward.
            launched: what made its only launch.
            is_alike: as :func:`alike` makes it of its query and output, and what else it was given.
        """
        plan = step.split if step.prefill is None else step.prefill
        assert plan is not None
        self._launched: Any = launched
        self._is_alike = is_alike
        self._is_prefill = step.prefill is not None
        self._plan = plan.likeness
        self._read, self._of_prefill = step.read.likeness, step.read.likeness_of_prefill

    def __call__(
        self,
        step: TritonAttentionMetadata,
        query: torch.Tensor,
        output: torch.Tensor,
        others: Sequence[torch.Tensor],
        rest: tuple[int | None, ...],
    ) -> bool:
        """Enqueue a forward; False, and nothing is done, where it is not like that one.

        Args:
            step: the builder's record.
            query: ``[T, H, D]``.
            output: ``[T, H, Dv]`` or ``[T, H * Dv]``.
            others: what else it is given.
            rest: addresses of sinks, slopes, LSE, the output's scale and the cache's scales; None
                of those that there are not.
        """
        split, prefill, read = step.split, step.prefill, step.read
        least, tokens = step.num_actual_tokens, query.size(0)
        if (
            read.likeness != self._read
            or not read.is_plain
            or step.shared is not None
            or tokens < least
            or output.size(0) < least
            or not self._is_alike(query, output, *others)
            or collected.get() is not None
        ):
            return False
        given = ((query.data_ptr(), tokens, output.data_ptr()), read.table, rest)
        if self._is_prefill:
            if prefill is None or split is not None or prefill.likeness != self._plan:
                return False
            if read.likeness_of_prefill != self._of_prefill:
                return False
            done: bool = self._launched.launch(prefill, query, given, read.lengths)
            return done
        if split is None or prefill is not None or split.likeness != self._plan:
            return False
        programs = split.groups * split.heads
        done = self._launched.launch(programs, (*given, split.pointers.given))
        return done


def alike(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Whether others differ from these in place and, the first two, in their number of rows only;
    None where torch does not tell.
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
