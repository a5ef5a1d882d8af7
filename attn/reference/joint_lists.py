"""Joint lists of neighbouring tokens, in plain torch."""

from __future__ import annotations

import torch

from builders.sparse.arguments import JointLists, TopkLists


def join_lists(
    lists: TopkLists, block_table: torch.Tensor, block_size: int, joint: JointLists
) -> None:
    """Join lists in torch: see :func:`attn.ops.joint_lists.join_lists`."""
    ids, visible, reqs = lists[:3]
    for group in range(len(joint.entries)):
        tokens = range(group * joint.tokens, min((group + 1) * joint.tokens, len(ids)))
        found: list[torch.Tensor] = []
        for req in dict.fromkeys(int(reqs[token]) for token in tokens):
            reach = block_table.shape[1] * block_size
            members = torch.zeros(reach, dtype=torch.int64, device=ids.device)
            for bit, token in enumerate(tokens):
                if int(reqs[token]) == req:
                    mine = ids[token]
                    seen = (mine >= 0) & (mine < visible[token]) & (mine < reach)
                    members[mine[seen].long()] |= 1 << bit
            at = members.nonzero().flatten()
            slots = block_table[req, at // block_size].long() * block_size + at % block_size
            found.append(slots | (members[at] << (32 - joint.tokens)))
        entries = torch.cat(found) if found else ids.new_empty(0).long()
        # Entries are patterns of 32 bits, whose highest bit is the last token's.
        entries = torch.where(entries >= 1 << 31, entries - (1 << 32), entries)
        joint.entries[group, : len(entries)] = entries.to(torch.int32)
        joint.counts[group] = len(entries)
