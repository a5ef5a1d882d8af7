"""Options of ``attn run`` that name kernels: one for each field of ``EngineConfig.kernels``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from attn.registry import AttentionBackendEnum
from specs.attention import MlaKernel
from specs.engine import DenseKernels, Kernels, LatentKernels, SparseKernels
from specs.model import LayerGeometry, LayerKind, ModelGeometry

AUTO: Final = "auto"
_READERS: Final[dict[tuple[str, str], tuple[str, ...]]] = {
    ("dense", "prefill"): ("TRITON_ATTN",),
    ("dense", "decode"): ("TRITON_ATTN",),
    ("latent", "prefill"): ("TRITON_MLA", "FLASHINFER_MLA", "TRTLLM_MLA"),
    ("latent", "decode"): ("TRITON_MLA",),
    ("sparse", "prefill"): ("SPARSE_MLA",),
    ("sparse", "decode"): ("SPARSE_MLA",),
    ("sparse", "own_prefill"): ("SPARSE_MLA",),
    ("sparse", "own_decode"): ("SPARSE_MLA",),
}
"""Backends that read a field; the first is asked for where none is named. Not here: the rows of
TRTLLM_MLA, which are a part of the request, so that a backend refuses them itself."""


@dataclass(frozen=True)
class NamedKernel:
    """A kernel that an option names."""

    family: str
    field: str
    kernel: StrEnum

    @property
    def option(self) -> str:
        """Without dashes in front."""
        return f"{self.family}-{self.field.replace('_', '-')}-kernel"

    def __str__(self) -> str:
        return f"{self.option} {self.kernel.value}"


def kernels_of(**options: StrEnum | None) -> Kernels:
    """The kernel record of the command's options; an option of None keeps the record's default.

    Args:
        options: values by family and field, such as ``sparse_own_decode_kernel``.
    """
    given: dict[str, dict[str, StrEnum]] = {}
    for name, kernel in options.items():
        if kernel is not None:
            family, _, field = name.removesuffix("_kernel").partition("_")
            given.setdefault(family, {})[field] = kernel
    return Kernels.model_validate(given)


def named_kernels(kernels: Kernels) -> Iterator[NamedKernel]:
    """Kernels that were asked for, in the order of the record's fields.

    The library's own sparse kernel counts as asked for where it was named, although it is the
    default: it asks for SPARSE_MLA. ``auto`` asks for nothing.
    """
    records: dict[str, DenseKernels | LatentKernels | SparseKernels] = {
        "dense": kernels.dense,
        "latent": kernels.latent,
        "sparse": kernels.sparse,
    }
    for family, record in records.items():
        for field in type(record).model_fields:
            kernel = getattr(record, field)
            if field in record.model_fields_set and kernel.value != AUTO:
                yield NamedKernel(family, field, kernel)


def check_families(kernels: Kernels, model: ModelGeometry) -> None:
    """Every dense or latent kernel that is named has layers to serve.

    Raises:
        ValueError: the model has none; the message names the option.
    """
    families = {family_of(layer) for layer in model.layers}
    for named in named_kernels(kernels):
        # The request of every latent layer names rows; a sparse backend refuses them itself.
        is_refused = named.field == "rows" and "sparse" in families
        if named.family not in ("sparse", *families) and not is_refused:
            raise ValueError(
                f"{named} is a kernel of {named.family} layers, and {model.name} has none"
            )


def backend_asked_for(
    kernels: Kernels, geometry: LayerGeometry, backend: str | None, model: str
) -> str | None:
    """The name of the backend that a model's layers ask for; a named kernel asks for its backend.

    Args:
        kernels: what is named.
        geometry: the layers.
        backend: the backend that is named; None where none is.
        model: its name, for errors.

    Raises:
        ValueError: a sparse kernel for other layers, or a backend that does not read a kernel's
            option.
    """
    asked = backend
    for named in named_kernels(kernels):
        if named.family == "sparse" and geometry.kind is not LayerKind.SPARSE_MLA:
            raise ValueError(
                f"{named} is a kernel of sparse latent layers, and {model} has "
                f"{geometry.kind.value} layers"
            )
        readers = _READERS.get((named.family, named.field))
        if readers is None or named.family != family_of(geometry):
            continue
        if named.field == "decode" and kernels.latent.rows is MlaKernel.TRITON:
            # Its rows are those of TRITON_MLA's kernel.
            readers = (*readers, "TRTLLM_MLA")
        name = asked or readers[0]
        asked = AttentionBackendEnum[name].name
        if asked not in readers:
            raise ValueError(f"{named} is a kernel of {' or '.join(readers)}, got {name}")
    return asked


def family_of(geometry: LayerGeometry) -> str:
    """The field of ``Kernels`` that layers go by."""
    if geometry.kind is LayerKind.SPARSE_MLA:
        return "sparse"
    return "latent" if geometry.kind.is_mla else "dense"
