"""Sparse latent layers in SGLang: its own backend's steps and pools, our attention of its lists."""

import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context

from attn.integrations.sglang import sparse
from attn.integrations.sglang.sparse import SparseBackend
from attn.testing import budget, oracle
from tests.sglang.slot_engine import BUDGET, MAX_LEN, Engine, runner_of

HEADS, RANK, ROPE, PAGE = 4, 512, 64, 64
SCALE = (128 + ROPE) ** -0.5
FP8 = torch.float8_e4m3fn


class OneRank:
    """SGLang's groups of ranks, where there is one rank."""

    def __getattr__(self, name):
        return 1 if name.endswith("_size") else 0


def theirs(self, runner, *args, **kwargs):
    """What SGLang's constructor sets, as far as steps without an indexer read it."""
    known = {
        "device": "cpu",
        "token_to_kv_pool": runner.token_to_kv_pool,
        "req_to_token_pool": runner.req_to_token_pool,
        "hisparse_coordinator": None,
        "dsa_index_topk": runner.topk,
        "dsa_index_kpool": 1,
        "real_page_size": PAGE,
        "physical_page_size": PAGE,
        "dcp_size": 1,
        "_kv_shard_pool": None,
        "dsa_kv_cache_store_fp8": runner.token_to_kv_pool.dsa_kv_cache_store_fp8,
        "speculative_num_draft_tokens": 3,
        "dsa_prefill_impl": "flashmla_kv",
        "dsa_decode_impl": "flashmla_kv",
        "dsa_topk_backend": dsa_backend.DSATopKBackend("sgl-kernel"),
        "use_fused_topk": runner.fused,
        "_arange_buf": torch.arange(1024, dtype=torch.int32),
        "max_context_len": MAX_LEN,
        # What SGLang's own top-k kernel needs, which is compiled.
        "_build_topk_v2_plan": lambda lens: None,
    }
    for name, value in known.items():
        setattr(self, name, value)


class SparseEngine(Engine):
    """One sparse latent layer over SGLang's pool, called as SGLang's models call it."""

    def __init__(self, *, cache=torch.float32, topk=8, fused=True, **args):
        self.generator = torch.Generator().manual_seed(3)
        self.dtype = torch.bfloat16 if cache is FP8 else torch.float32
        self.cache, self.page_size, self.topk, self.fused = cache, PAGE, topk, fused
        self.windows_apart, self.num_pages = False, 16
        self.slots = ReqToTokenPool(8, MAX_LEN, "cpu", False)
        width = 656 if cache is FP8 else RANK + ROPE
        self.pool = DSATokenToKVPool(
            *(self.num_pages * PAGE, PAGE, RANK, cache, ROPE, 1, "cpu", 128, False, width)
        )
        self.pool.kv_buffer[0].view(torch.uint8).fill_(0xFF)
        self.free = (torch.randperm(self.num_pages, generator=self.generator) + 1).tolist()
        self.layer = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
        self.runner = runner_of(
            *(self.slots, self.pool, PAGE, [self.layer], self.dtype, args, True),
            kv_lora_rank=RANK, qk_rope_head_dim=ROPE,
        )  # fmt: skip
        self.runner.model_config.hf_text_config = SimpleNamespace(index_topk=topk)
        self.runner.fused, self.runner.topk = fused, topk
        self.backend = SparseBackend(self.runner)

    def lists(self, requests, counts):
        """For every new token some of the positions that it sees, in any order, then -1."""
        made = []
        for one, count in zip(requests, counts, strict=True):
            for position in range(one.length, one.length + count):
                order = torch.randperm(position + 1, generator=self.generator)[: self.topk]
                filler = torch.full((self.topk - len(order),), -1)
                made.append(torch.cat([order, filler]))
        return torch.stack(made).int()

    def run(self, batch, requests, counts, extra_rows, lse, plan, backend):
        tokens = sum(counts)
        batch.seq_lens_cpu = batch.seq_lens.clone()
        batch.seq_lens_sum = int(batch.seq_lens.sum())
        q, rows = 2 * self.draw(tokens, HEADS, RANK + ROPE), self.draw(tokens, 1, RANK + ROPE)
        lists = self.lists(requests, counts)
        given = lists
        if self.fused:
            # The top-k kernel of SGLang's indexer has looked the slots up.
            owners = [one.row for one, n in zip(requests, counts, strict=True) for _ in range(n)]
            table = self.slots.req_to_token[torch.tensor(owners)]
            given = torch.where(lists < 0, -1, table.gather(1, lists.clamp(min=0).long()))
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            backend.init_forward_metadata(batch)
            latent, rope = rows[..., :RANK].contiguous(), rows[..., RANK:].contiguous()
            more = {"q_rope": q[..., RANK:].contiguous(), "k_rope": rope, "topk_indices": given}
            query = q[..., :RANK].contiguous()
            out = self.layer(query, latent, latent, batch, **more).view(tokens, HEADS, RANK)
        return self.worst(out, q, rows, lists, requests, counts)

    def worst(self, out, q, rows, lists, requests, counts):
        start, worst = 0, 0.0
        for one, count in zip(requests, counts, strict=True):
            stop = start + count
            slots = self.slots.req_to_token[one.row, : one.length + count].long()
            cached = self.stored_rows(slots, rows[start:stop, 0], one)
            for row in range(start, stop):
                seen = cached[lists[row][lists[row] >= 0].long()]
                wanted, _ = oracle.attention(
                    *(q[row : row + 1], seen[:, None], seen[:, None, :RANK]),
                    *(len(seen) - 1, oracle.Rules(scale=SCALE)),
                )
                worst = max(worst, float(budget.row_errors(out[row : row + 1], wanted).max()))
            start = stop
        return worst

    def stored_rows(self, slots, new, one):
        """A request's rows in float64: as written, or as SGLang has packed them."""
        if self.cache is FP8:
            packed = self.pool.kv_buffer[0][slots, 0]
            latent = packed[:, :RANK].view(FP8).double().view(-1, 4, 128)
            scales = packed[:, RANK : RANK + 16].contiguous().view(torch.float32).double()
            rope = packed[:, RANK + 16 :].contiguous().view(torch.bfloat16).double()
            cached = torch.cat([(latent * scales[..., None]).flatten(1), rope], -1)
            # SGLang's own writer is not under test; that the right tokens were written is. Triton's
            # interpreter loses a carry when it rounds to e4m3, which halves some values.
            error = (cached[one.length :] - new.double()).abs()
            assert (error <= 0.51 * new.double().abs() + 0.02).all()
            return cached
        cached = torch.cat([one.keys.get(0, new[:0].double())[: one.length], new.double()])
        one.keys[0] = cached
        return cached


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    monkeypatch.setattr(dsa_backend.DeepseekSparseAttnBackend, "__init__", theirs)
    alone = {"get_parallel": OneRank, "is_dsa_enable_prefill_cp": lambda: False}
    for path, module in [*sys.modules.items()]:
        for name in alone if path.startswith("sglang.") else ():
            if name in vars(module):
                monkeypatch.setattr(module, name, alone[name])


def expanded_lens(counts, lens, total, most):
    """SGLang's kernel for the lengths of a verify's rows needs a GPU."""
    pairs = zip(counts.tolist(), lens.tolist(), strict=True)
    rows = [torch.arange(kv - new + 1, kv + 1, dtype=torch.int32) for new, kv in pairs]
    return torch.cat(rows)


def served(engine):
    one, two = engine.request(), engine.request()
    yield engine.extend([one, two], [70, 5])
    yield engine.decode([two, one])
    yield engine.extend([one], [6])
    yield engine.verify([one, two], 3)


@pytest.mark.parametrize(("cache", "most"), [(torch.float32, BUDGET), (FP8, 2e-2)])
def test_every_mode(cache, most, monkeypatch):
    monkeypatch.setattr(dsa_backend, "seqlens_expand_triton", expanded_lens)
    assert max(served(SparseEngine(cache=cache))) < most


def test_lists_of_positions():
    """SGLang looks up the slots of positions itself, for lists of 2048 alone."""
    engine = SparseEngine(topk=2048, fused=False)
    one = engine.request()
    assert engine.extend([one], [3]) < BUDGET
    assert engine.decode([one]) < BUDGET


def test_many_rows_are_attended_in_parts():
    engine = SparseEngine()
    engine.backend.attention.most_rows = 3
    one = engine.request()
    assert engine.extend([one], [8]) < BUDGET


def test_short_prompts_attend_lists_too():
    engine = SparseEngine()
    engine.backend.use_mha = True
    engine.backend.set_dsa_prefill_impl(None)
    assert engine.backend.use_mha is False


def rotary_part_left_out(monkeypatch):
    attend = sparse.sparse_mla
    monkeypatch.setattr(
        sparse, "sparse_mla", lambda q, r, *args, **more: attend(q, 0 * r, *args, **more)
    )


def neighbouring_slots(monkeypatch):
    attend = sparse.sparse_mla

    def wrong(q, r, listed, *args, **more):
        moved = torch.where(listed.indices > 0, listed.indices - 1, listed.indices)
        attend(q, r, listed._replace(indices=moved), *args, **more)

    monkeypatch.setattr(sparse, "sparse_mla", wrong)


@pytest.mark.parametrize("seed", [rotary_part_left_out, neighbouring_slots])
def test_a_fault_is_seen(seed, monkeypatch):
    seed(monkeypatch)
    engine = SparseEngine()
    one = engine.request()
    assert not engine.extend([one], [8]) < 100 * BUDGET


REFUSED = {
    "set --dcp-size 1": {"dcp_size": 2},
    "set --speculative-eagle-topk 1": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_engine_that_is_not_served_is_refused(message):
    with pytest.raises(ValueError, match="cannot serve this engine") as error:
        SparseEngine(**REFUSED[message])
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("field", "message"), [("index_kpool", "stands for 4 tokens"), ("learnable_sink", "have sinks")]
)
def test_a_model_that_is_not_served_is_refused(field, message):
    engine = SparseEngine()
    config = SimpleNamespace(index_topk=8, **{field: 4})
    engine.runner.model_config.hf_text_config = config
    with pytest.raises(ValueError, match=message):
        SparseBackend(engine.runner)


def test_rows_of_another_format_are_refused():
    engine = SparseEngine()
    engine.pool.kv_cache_dim, engine.pool.dtype = RANK + ROPE, FP8
    with pytest.raises(ValueError, match="leave --dsa-prefill-backend"):
        SparseBackend(engine.runner)
