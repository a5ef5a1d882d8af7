"""Options of ``attn run`` that name kernels, and the backends that they ask for."""

import inspect
from enum import StrEnum

import pytest

from attn.cli.app import run
from attn.cli.kernels import (
    NamedKernel,
    backend_asked_for,
    check_families,
    family_of,
    kernels_of,
    named_kernels,
)
from specs.attention import MlaKernel
from specs.engine import DecodeKernel, Kernels, PrefillKernel
from specs.hf_config import load_model_geometry
from specs.model import LayerGeometry
from specs.sparse_mla import SparseKernel

MODELS = {"dense": "llama-3.1-8b", "latent": "deepseek-v3", "sparse": "deepseek-v3.2"}
FIELDS = [
    (family, field)
    for family, record in Kernels.model_fields.items()
    for field in record.annotation.model_fields
]


def layer_of(family: str) -> LayerGeometry:
    layer = load_model_geometry(MODELS[family]).layers[0]
    assert family_of(layer) == family
    return layer


def asked(family: str, backend: str | None = None, **options: StrEnum) -> str | None:
    return backend_asked_for(kernels_of(**options), layer_of(family), backend, "a model")


def test_every_field_has_an_option_of_its_own() -> None:
    parameters = inspect.signature(run).parameters
    options = {name for name in parameters if name.endswith("_kernel")}
    assert options == {f"{family}_{field}_kernel" for family, field in FIELDS}


@pytest.mark.parametrize(("family", "field"), FIELDS)
def test_an_option_sets_its_field_alone(family: str, field: str) -> None:
    record = Kernels.model_fields[family].annotation
    kernel = list(record.model_fields[field].annotation)[-1]
    kernels = kernels_of(**{f"{family}_{field}_kernel": kernel})
    assert getattr(getattr(kernels, family), field) is kernel
    assert [*named_kernels(kernels)] == [NamedKernel(family, field, kernel)]
    (named,) = named_kernels(kernels)
    assert named.option == f"{family}-{field.replace('_', '-')}-kernel"


def test_what_is_left_open_or_to_the_library_is_not_asked_for() -> None:
    given = kernels_of(dense_prefill_kernel=None, dense_decode_kernel=DecodeKernel.AUTO)
    assert given == Kernels()
    assert [*named_kernels(given)] == []


def test_a_named_kernel_asks_for_the_backend_that_has_it() -> None:
    hopper = DecodeKernel.HOPPER
    assert asked("dense") is None
    assert asked("dense", "TORCH_REF") == "TORCH_REF"
    assert asked("dense", dense_decode_kernel=hopper) == "TRITON_ATTN"
    assert asked("latent", latent_decode_kernel=hopper) == "TRITON_MLA"
    assert asked("latent", "flashinfer_mla", latent_prefill_kernel=PrefillKernel.TRITON) == (
        "FLASHINFER_MLA"
    )
    assert asked("sparse", sparse_decode_kernel=SparseKernel.TRITON_SPARSE) == "SPARSE_MLA"
    assert asked("sparse", "NSA", sparse_own_decode_kernel=hopper) == "SPARSE_MLA"
    # The request names the kernel of TRTLLM_MLA's rows; other backends refuse it.
    assert asked("latent", latent_rows_kernel=MlaKernel.TRITON) is None


def test_a_backend_that_does_not_read_an_option_is_refused() -> None:
    hopper = DecodeKernel.HOPPER
    with pytest.raises(ValueError, match="dense-decode-kernel hopper is a kernel of TRITON_ATTN"):
        asked("dense", "TORCH_REF", dense_decode_kernel=hopper)
    with pytest.raises(ValueError, match="of TRITON_MLA, got TRTLLM_MLA"):
        asked("latent", "TRTLLM_MLA", latent_decode_kernel=hopper)
    by_triton = {"latent_decode_kernel": hopper, "latent_rows_kernel": MlaKernel.TRITON}
    assert asked("latent", "TRTLLM_MLA", **by_triton) == "TRTLLM_MLA"


@pytest.mark.parametrize("family", MODELS)
def test_a_kernel_of_layers_that_a_model_does_not_have_is_refused(family: str) -> None:
    model = load_model_geometry(MODELS[family])
    dense = kernels_of(dense_prefill_kernel=PrefillKernel.HOPPER)
    latent = kernels_of(latent_prefill_kernel=PrefillKernel.HOPPER)
    for kernels, own in ((dense, "dense"), (latent, "latent")):
        if own == family:
            check_families(kernels, model)
            continue
        said = f"{own}-prefill-kernel hopper is a kernel of {own} layers, and {model.name} has none"
        with pytest.raises(ValueError, match=said):
            check_families(kernels, model)
    if family != "sparse":
        with pytest.raises(ValueError, match="sparse-decode-kernel fa3 is a kernel of sparse"):
            asked(family, sparse_decode_kernel=SparseKernel.FA3)
