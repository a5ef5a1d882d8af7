"""Look into the plan of one decode step: who computes which keys.

TRITON_ATTN cuts the keys of a batch into segments and shares them out among programs. The plan is
computed on the device and its values are read back here, for printing only. Without a GPU the plan
comes from its twin on the host.

    python docs/examples/look_into_a_plan.py [KEYS ...]
"""

import sys

import torch

from attn.registry import AttentionBackendEnum
from builders.batch import CommonAttentionMetadata
from specs.base import cdiv
from specs.engine import EngineConfig
from specs.kv_cache import FullAttentionSpec

lengths = [int(text) for text in sys.argv[1:]] or [5000, 300, 40]
device = "cuda" if torch.cuda.is_available() else "cpu"
spec = FullAttentionSpec(block_size=16, num_kv_heads=8, head_size=128)
config = EngineConfig(max_model_len=max(lengths), max_num_seqs=len(lengths), num_heads=32)
builder_cls = AttentionBackendEnum.TRITON_ATTN.get_class().get_builder_cls()
builder = builder_cls(spec, ["layers.0"], config, device)

# One new token for each request; the blocks are numbered in order.
width = cdiv(max(lengths), 16)
table = 1 + torch.arange(len(lengths) * width, dtype=torch.int32, device=device).view(-1, width)
batch = CommonAttentionMetadata.from_lengths([1] * len(lengths), lengths, table, block_size=16)
plan = builder.build(0, batch).split

print(
    f"{plan.groups} groups of {plan.heads} programs; a program has {8 // plan.heads} of 8 KV heads"
)
print(f"a tile has {plan.tile.kv_tile} keys")
columns = {"request": 0, "KV length": 3, "tiles": 6, "segments": 9}
items = plan.rows[: int(plan.total[0])].tolist()
for item in items:
    print("work item:", ", ".join(f"{name} {item[at]}" for name, at in columns.items()))
# A program walks the keys of a work item once for each of its KV heads.
for group, (start, segment) in enumerate(plan.starts[:-1].tolist()):
    item, walk = divmod(start, plan.head_loops)
    print(f"group {group} starts in work item {item}, walk {walk}, at segment {segment}")
