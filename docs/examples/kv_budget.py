"""How many tokens of KV cache a memory budget holds, for each cache dtype of a model.

    python docs/examples/kv_budget.py [MODEL] [GIBIBYTES]

MODEL is a bundled name, such as ``llama-3.1-8b``, or the path of a ``config.json``.
"""

import sys

from specs.dtypes import CacheDType
from specs.hf_config import load_model_geometry

model = load_model_geometry(sys.argv[1] if len(sys.argv) > 1 else "llama-3.1-8b")
budget = int(float(sys.argv[2] if len(sys.argv) > 2 else 40) * 2**30)
block_size = 64
dtypes = [CacheDType.AUTO, CacheDType.FP8]
if not any(layer.kind.is_mla for layer in model.layers):
    dtypes.append(CacheDType.INT4_PER_TOKEN_HEAD)

print(f"{model.name}: {model.num_layers} attention layers, {budget / 2**30:g} GiB of KV cache")
for dtype in dtypes:
    # A window frees blocks that it has left; a request of full length tells the two apart.
    per_block = longest = 0
    for layer, indices in model.groups():
        spec = layer.kv_cache_spec(block_size, model.dtype, dtype)
        per_block += len(indices) * spec.page_size_bytes
        blocks = spec.num_blocks_for(model.max_position_embeddings, block_size)
        longest += len(indices) * spec.page_size_bytes * blocks
    print(
        f"{dtype.value:20} {per_block // block_size:8,} bytes a token, "
        f"{budget // per_block * block_size:12,} tokens, "
        f"{budget // longest:5,} requests of {model.max_position_embeddings:,} tokens"
    )
