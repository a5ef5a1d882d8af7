"""TRITON_MLA: latent attention in Triton, on every GPU."""

from __future__ import annotations

from typing import ClassVar

from attn.backends.base import AttentionBackend
from attn.impls.latent.triton_mla import TritonMLAImpl
from builders.checks.kernel_limits import BLOCK_MULTIPLE, HEAD_SIZES, MODEL_DTYPES
from builders.latent.triton_mla import CACHE_DTYPES, TritonMLAMetadataBuilder
from specs.attention import AttentionCGSupport, BackendCapabilities, HeadSizes, MultipleOf
from specs.devices import DeviceKind
from specs.dtypes import DType


class TritonMLABackend(AttentionBackend):
    """Absorbed decode with split KV, chunked expanded prefill, CUDA graphs of decodes.

    A decode or verify row has the same bits whatever else is in its batch: its keys are split by
    position alone, and the states of the pieces are folded in their order. The Hopper kernel for
    tiles of 64 rows is the exception, and the step's record says where it serves.

    The rows of a prompt depend on its chunking, so the backend does not declare batch invariance.
    With the engine's ``batch_invariant`` set they depend on nothing else: cached context is then
    attended in chunks of one size, whatever the number of requests.
    """

    capabilities: ClassVar[BackendCapabilities] = BackendCapabilities(
        dtypes=tuple(DType.parse(dtype) for dtype in MODEL_DTYPES),
        kv_cache_dtypes=CACHE_DTYPES,
        block_sizes=(MultipleOf(base=BLOCK_MULTIPLE),),
        head_sizes=HeadSizes(
            # Sizes of a latent row: the latent part and the rotary part.
            multiple_of=HEAD_SIZES.step,
            minimum=2 * HEAD_SIZES.start,
            maximum=2 * (HEAD_SIZES.stop - 1),
        ),
        device_kinds=(
            DeviceKind.SM80,
            DeviceKind.SM89,
            DeviceKind.SM90,
            DeviceKind.SM100,
            DeviceKind.SM120,
            DeviceKind.ROCM,
        ),
        cudagraph_support=AttentionCGSupport.UNIFORM_BATCH,
        is_mla=True,
        sliding_window=True,
        device_cpu_query_lens_mismatch=True,
        dcp=True,
        lse=True,
        row_bits=True,
    )

    @staticmethod
    def get_name() -> str:
        """Name of the backend in the registry."""
        return "TRITON_MLA"

    @staticmethod
    def get_impl_cls() -> type[TritonMLAImpl]:
        """The impl of this triple."""
        return TritonMLAImpl

    @staticmethod
    def get_builder_cls() -> type[TritonMLAMetadataBuilder]:
        """The metadata builder of this triple."""
        return TritonMLAMetadataBuilder
