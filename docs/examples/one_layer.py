"""One attention layer over a paged KV cache, in 20 lines: two prompts, then their outputs."""

import torch

from attn import get_attn_backend
from attn.impls.base import AttentionImpl, LayerScales
from builders.batch import CommonAttentionMetadata
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec

# 32 query heads over 8 KV heads of size 128. The selector takes this machine's best backend.
backend = get_attn_backend(head_size=128, dtype=torch.bfloat16, kv_cache_dtype="auto")
device = "cuda" if torch.cuda.is_available() else "cpu"
spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
config = EngineConfig(max_model_len=512, max_num_seqs=8, num_heads=32)
kv_cache = backend.kv_cache_layout(spec).allocate(64, device)  # 64 blocks
builder = backend.get_builder_cls()(spec, ["layers.0"], config, device)
impl = backend.get_impl_cls()(32, 128, 128**-0.5, 8)
assert isinstance(impl, AttentionImpl)  # of a dense layer

# A prompt of 20 tokens in blocks 3 and 1, and one of 5 tokens in block 2.
table = torch.tensor([[3, 1], [2, 0]], dtype=torch.int32, device=device)
batch = CommonAttentionMetadata.from_lengths([20, 5], [20, 5], table, block_size=16)
query, output = torch.randn(2, 25, 32, 128, dtype=torch.bfloat16, device=device)
key, value = torch.randn(2, 25, 8, 128, dtype=torch.bfloat16, device=device)
layer = LayerScales.of(k=1.0, v=1.0, device=device)

record = builder.build(0, batch)  # once per step
impl.do_kv_cache_update(layer, key, value, kv_cache, record.slot_mapping)  # once per layer
impl.forward(layer, query, key, value, kv_cache, record, output)

# The first token of a prompt sees itself alone, so its output is its value.
print(backend.get_name(), "output", [*output.shape])
print("first token right:", torch.equal(output[0], value[0].repeat_interleave(4, dim=0)))
