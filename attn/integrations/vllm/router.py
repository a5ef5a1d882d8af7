"""``CUSTOM`` in vLLM's registry on CUDA: for every layer our best class for its kind.

For a layer vLLM looks up the class behind ``CUSTOM``, asks it whether it serves the layer
(``validate_configuration``), and takes the class whose import path it names (``full_cls_name``).
The class behind ``CUSTOM`` therefore picks per layer: dense, latent and sparse layers of one model,
and the layers of its draft model, each get their own class.

Every look-up makes a new class, which holds the pick of one selection. Selections share nothing, so
their order does not matter, nor does the thread that makes them.
"""

from __future__ import annotations

from typing import Any, Final

from attn.errors import one_line
from attn.integrations.vllm import choice, members
from attn.integrations.vllm.choice import LayerKind

_NAME: Final = members.CUSTOM
"""Name of the module's attribute for vLLM's registry; :func:`__getattr__` makes the class."""


class Router:
    """The class behind ``CUSTOM``; it is made together with our class for dense layers.

    Questions that are not about one layer are answered as our class for dense layers answers them.
    """

    dense: type[Any]
    """Our class for dense layers."""
    picked: type[Any] | None = None
    """Our class for the layer that was asked about last; None before any."""

    @classmethod
    def validate_configuration(cls, **asked: Any) -> list[str]:
        """Pick our class for a layer, and return every reason why that class cannot serve it.

        Args:
            asked: the fields of vLLM's selector config, and ``device_capability``.
        """
        kind = LayerKind.of(asked["use_mla"], asked["use_sparse"])
        device = choice.device_of(asked["device_capability"])
        name = choice.chosen(device, is_routed=True).get(kind)
        if name is None:
            return [choice.lacking(kind, device)]
        try:
            picked = class_of(name)
        except (ImportError, OSError, ValueError) as error:
            # vLLM 0.26 would show the kind of error alone.
            return [one_line(error)]
        cls.picked = picked
        reasons: list[str] = picked.validate_configuration(**asked)
        return reasons

    @classmethod
    def full_cls_name(cls) -> tuple[str, str]:
        """Module and name of the picked class; of the dense class before any pick."""
        where: tuple[str, str] = (cls.picked or cls.dense).full_cls_name()
        return where


def class_of(backend: str) -> type[Any]:
    """The vLLM class of one of our backends, under the name ``CUSTOM``."""
    made: type[Any] = getattr(members, members.attribute_of(_NAME, backend))
    return made


def __getattr__(name: str) -> Any:
    if name != _NAME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from vllm.platforms import current_platform

    device = choice.device_of(current_platform.get_device_capability())
    dense = class_of(choice.chosen(device, is_routed=True)[LayerKind.DENSE])
    where = {"__module__": __name__, "__qualname__": _NAME, "__doc__": Router.__doc__}
    return type(_NAME, (Router, dense), {**where, "dense": dense})
