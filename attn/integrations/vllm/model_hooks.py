"""What the indexer needs before its model is imported, placed by ``register()`` at little cost.

Where DeepGEMM is missing, vLLM's op for indexers refuses to be made. An indexer is made before its
layer selects a backend, so this cannot wait for the selection: the op's constructor asks vLLM which
backend the layer will get. The op's module is large, so it is changed when the model imports it.

On CUDA, vLLM 0.33 serves DeepSeek-V3.2 and GLM-5 by classes whose fused Triton kernels convert to
e4m3 in hardware. GPUs older than compute capability 8.9 cannot compile them, so vLLM serves neither
model there. Its generic classes of the same models, which it keeps for CPU and XPU, need no such
kernel: on these GPUs, and only there, the models' names are registered for them.
"""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

from specs.devices import ComputeCapability, DeviceKind, kind_of

logger = logging.getLogger("vllm.attn_backends")

MEMBERS: Final = "attn.integrations.vllm.members"
"""The module that has the adapted classes."""
OP_MODULE: Final = "vllm.model_executor.layers.sparse_attn_indexer"
FUSED_MODELS: Final = "vllm.models.deepseek_v32"
"""Package of the models with fused kernels in vLLM 0.33."""
GENERIC_MODELS: Final = {
    "DeepseekV32ForCausalLM": "vllm.model_executor.models.deepseek_v2:DeepseekV3ForCausalLM",
    "GlmMoeDsaForCausalLM": "vllm.model_executor.models.deepseek_v2:GlmMoeDsaForCausalLM",
    "DeepseekV32MTPModel": "vllm.model_executor.models.deepseek_mtp:DeepSeekMTP",
}
"""Import path of vLLM's generic class for each architecture with fused kernels."""
_OLD: Final = DeviceKind.SM80
"""Kind of the GPUs that do not convert to e4m3 in hardware."""
_MARK: Final = "attn_backends_spares_deep_gemm"


def install_when_imported() -> None:
    """Place what models with indexers will need; nothing heavy is imported."""
    use_generic_models()
    wait_for_op()


def wait_for_op() -> None:
    """Where DeepGEMM is missing, let the ops of indexers that will be ours be made without it."""
    from vllm.utils.import_utils import has_deep_gemm

    if has_deep_gemm():
        return
    module = sys.modules.get(OP_MODULE)
    if module is not None:
        spare_deep_gemm(module)
    elif not any(isinstance(finder, _Waiting) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Waiting())


def spare_deep_gemm(module: ModuleType) -> None:
    """Make the op's constructor ask for DeepGEMM only where vLLM's kernels will run.

    Args:
        module: the op's module.
    """
    op: Any = vars(module)["SparseAttnIndexer"]
    theirs = op.__init__
    if hasattr(theirs, _MARK):
        return

    @functools.wraps(theirs)
    def make(self: Any, *args: Any, **extras: Any) -> None:
        try:
            theirs(self, *args, **extras)
        except RuntimeError as error:
            # The refusal comes last: all that an indexer of ours needs is set by then.
            if "DeepGEMM" not in str(error) or not _will_be_ours():
                raise

    setattr(make, _MARK, True)
    op.__init__ = make


def _will_be_ours() -> bool:
    """True where the sparse layers of the model that is being made select a class of ours."""
    import torch
    from vllm.config import get_current_vllm_config
    from vllm.v1.attention.selector import get_attn_backend

    config = get_current_vllm_config()
    try:
        backend = get_attn_backend(
            config.model_config.get_head_size(),
            torch.get_default_dtype(),
            config.cache_config.cache_dtype,
            use_mla=True,
            use_sparse=True,
            num_heads=config.model_config.get_num_attention_heads(config.parallel_config),
        )
    except ValueError:
        # The layer will say why no backend serves it.
        return False
    return bool(backend.__module__ == MEMBERS)


def use_generic_models() -> None:
    """On a CUDA GPU without e4m3, point the fused models' names to vLLM's generic classes.

    Names that point elsewhere stay, as all do in vLLM 0.26.
    """
    from vllm.platforms import current_platform

    capability = current_platform.get_device_capability() if current_platform.is_cuda() else None
    if capability is None or kind_of(ComputeCapability.model_validate(capability)) is not _OLD:
        return
    from vllm.model_executor.models.registry import ModelRegistry

    for name, path in GENERIC_MODELS.items():
        if getattr(ModelRegistry.models.get(name), "module_name", None) == FUSED_MODELS:
            ModelRegistry.register_model(name, path)
            logger.info(
                "attn-backends: %s is vLLM's generic %s: the kernels of the other class need "
                "compute capability 8.9, this is %d.%d",
                *(name, path, *capability),
            )


class _Waiting(MetaPathFinder):
    """Finds the op's module as Python does, and changes it after its import."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """The module's spec with a loader that changes the module; None for other modules."""
        if fullname != OP_MODULE:
            return None
        found = PathFinder.find_spec(fullname, path, target)
        if found is not None and found.loader is not None:
            found.loader = _Changing(found.loader)
        return found


class _Changing(Loader):
    """A loader around a module's own."""

    def __init__(self, loader: Loader) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        """What else importers ask of a loader, such as the module's source."""
        return getattr(self.loader, name)

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        """The module that the loader makes."""
        return self.loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, then change it."""
        self.loader.exec_module(module)
        spare_deep_gemm(module)
