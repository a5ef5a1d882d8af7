"""What the indexer needs before its model is imported, placed by ``register()`` at little cost.

Where DeepGEMM is missing, vLLM's op for indexers refuses to be made. An indexer is made before its
layer selects a backend, so this cannot wait for the selection: the op's constructor asks vLLM which
backend the layer will get. The op's module is large, so it is changed when the model imports it.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any, Final

OP_MODULE: Final = "vllm.model_executor.layers.sparse_attn_indexer"
_MARK: Final = "attn_backends_spares_deep_gemm"


def install_when_imported() -> None:
    """Let ops of indexers that will be ours be made without DeepGEMM; nothing heavy is imported.

    Where DeepGEMM is installed, nothing is done.
    """
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

    from attn.integrations.vllm import members

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
    return bool(backend.__module__ == members.__name__)


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
