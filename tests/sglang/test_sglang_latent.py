"""Latent layers in SGLang: prompts with expanded keys, and absorbed steps of every mode."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool, ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardBatch
from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
from sglang.srt.models.deepseek_common.attention_backend_handler import (
    AttentionBackendRegistry,
    AttnForwardMethod,
)

from attn.integrations.sglang import latent, steps
from attn.testing import budget, oracle
from builders.latent import prefill
from tests.sglang.slot_engine import BUDGET, MAX_LEN, MODE, Engine, runner_of
from tests.sglang.test_sglang_dense import draft_factory

FP8 = torch.float8_e4m3fn
HEADS, RANK, ROPE, NOPE, VALUE = 4, 64, 32, 32, 32
SCALE = (NOPE + ROPE) ** -0.5


class LatentEngine(Engine):
    """One latent layer with random projections, called as SGLang's models call it."""

    def __init__(self, *, cache=torch.float32, page_size=16, split=True, **args):
        self.generator = torch.Generator().manual_seed(1)
        self.dtype, self.cache, self.page_size, self.split = torch.float32, cache, page_size, split
        self.windows_apart = False
        self.num_pages = 48
        self.slots = ReqToTokenPool(8, MAX_LEN, "cpu", False)
        self.pool = MLATokenToKVPool(48 * page_size, page_size, cache, RANK, ROPE, 1, "cpu", False)
        self.pool.kv_buffer[0].view(torch.uint8).fill_(0x7F if cache.itemsize == 1 else 0xFF)
        self.free = (torch.randperm(self.num_pages, generator=self.generator) + 1).tolist()
        self.mqa = RadixAttention(HEADS, RANK + ROPE, SCALE, 1, 0, v_head_dim=RANK)
        self.mha = RadixAttention(HEADS, NOPE + ROPE, SCALE, HEADS, 0, v_head_dim=VALUE)
        self.layers = [self.mqa, self.mha]
        self.w_uk = self.draw(RANK, HEADS, NOPE) / 8
        self.w_uv = self.draw(RANK, HEADS, VALUE) / 8
        self.runner = runner_of(
            *(self.slots, self.pool, page_size, self.layers, self.dtype, args, True),
            kv_lora_rank=RANK, qk_rope_head_dim=ROPE, qk_nope_head_dim=NOPE, v_head_dim=VALUE,
        )  # fmt: skip
        self.backend = ATTENTION_BACKENDS["attn"](self.runner)
        weight = torch.cat([self.w_uk, self.w_uv], 2).flatten(1).T.contiguous()
        self.module = SimpleNamespace(attn_mha=self.mha, kv_b_proj=SimpleNamespace(weight=weight))
        self.asked = []

    def comes_expanded(self, batch):
        """Whether SGLang's model calls with keys of every head."""
        found = AttentionBackendRegistry.get_handler("attn")(self.module, batch)
        self.asked.append(found)
        return found is AttnForwardMethod.MHA

    def run(self, batch, requests, counts, extra_rows, lse, plan, backend):
        tokens = len(batch.out_cache_loc) + extra_rows
        q = 2 * self.draw(tokens, HEADS, NOPE + ROPE)
        rows = self.draw(tokens, 1, RANK + ROPE)
        with torch.no_grad(), forward_context(ForwardContext(attn_backend=backend)):
            if plan:
                backend.init_forward_metadata(batch)
            is_prompt = self.comes_expanded(batch)
            if is_prompt:
                out, kept = self._expanded(batch, q, rows, lse)
            else:
                out, kept = self._absorbed(batch, q, rows, lse)
        return self._worst(out, kept, q, rows, requests, counts, is_prompt)

    def _expanded(self, batch, q, rows, lse):
        slots = batch.out_cache_loc
        new = rows[: len(slots)]
        # SGLang's model writes these rows itself.
        stored = new.to(self.cache).view(torch.uint8)
        self.pool.get_key_buffer(0).view(torch.uint8)[slots] = stored
        key = torch.einsum("tl,lhp->thp", rows[:, 0, :RANK], self.w_uk)
        key = torch.cat([key, rows[..., RANK:].expand(-1, HEADS, -1)], -1)
        value = torch.einsum("tl,lhv->thv", rows[:, 0, :RANK], self.w_uv)
        batch.mha_return_lse = lse
        out = self.mha(q, key.flatten(1), value.flatten(1), batch, save_kv_cache=False)
        return out if lse else (out, None)

    def _absorbed(self, batch, q, rows, lse):
        latent_q = torch.einsum("thp,lhp->thl", q[..., :NOPE], self.w_uk)
        more = {"return_lse": True} if lse else {}
        if self.split:
            given = latent_q, rows[..., :RANK], rows[..., :RANK]
            more |= {"q_rope": q[..., NOPE:], "k_rope": rows[..., RANK:]}
        else:
            given = torch.cat([latent_q, q[..., NOPE:]], -1), rows, rows[..., :RANK].contiguous()
            given = given[0], given[1], torch.zeros(len(rows), RANK)
        out = self.mqa(*given, batch, **more)
        out, kept = out if lse else (out, None)
        out = out.view(-1, HEADS, RANK)
        return torch.einsum("thl,lhv->thv", out, self.w_uv), kept

    def _worst(self, out, kept, q, rows, requests, counts, is_prompt):
        start, worst = 0, 0.0
        out = out.reshape(len(q), HEADS, VALUE)
        w_uk, w_uv = self.w_uk.double(), self.w_uv.double()
        for one, count in zip(requests, counts, strict=True):
            stop = start + count
            new = rows[start:stop, 0]
            stored = new.to(self.cache).double()
            cached = torch.cat([one.keys.get(0, stored[:0])[: one.length], stored])
            one.keys[0] = cached
            # Keys of new tokens that come expanded are not rounded to the cache's type.
            seen = torch.cat([cached[: one.length], new.double()]) if is_prompt else cached
            key = torch.einsum("tl,lhp->thp", seen[:, :RANK], w_uk)
            key = torch.cat([key, seen[:, None, RANK:].expand(-1, HEADS, -1)], -1)
            value = torch.einsum("tl,lhv->thv", seen[:, :RANK], w_uv)
            rules = oracle.Rules(scale=SCALE)
            wanted, lse = oracle.attention(q[start:stop], key, value, one.length, rules)
            worst = max(worst, float(budget.row_errors(out[start:stop], wanted).max()))
            if kept is not None:
                worst = max(worst, float(budget.lse_errors(kept[start:stop], lse).max()))
            start = stop
        return worst


def their_choice(module, batch):
    """What SGLang does for a name that it does not know, without its arguments."""
    if not batch.forward_mode.is_extend_without_speculative():
        return AttnForwardMethod.MLA
    return AttnForwardMethod.MLA if any(batch.extend_prefix_lens_cpu) else AttnForwardMethod.MHA


@pytest.fixture(autouse=True)
def no_arguments(monkeypatch):
    monkeypatch.setitem(AttentionBackendRegistry._handlers, "triton", their_choice)


DRAFTS = {"speculative_num_draft_tokens": 3, "speculative_algorithm": "EAGLE"}


def served(engine, lse=False):
    one, two, three = (engine.request() for _ in range(3))
    more = {"lse": lse}
    yield engine.extend([one, two], [37, 5], extra_rows=2, **more)
    yield engine.decode([two, one], **more)
    yield engine.extend([one], [9], **more)
    yield engine.extend([three, two, one], [7, 1, 1], mode=MODE.MIXED, **more)
    yield engine.decode([one, three], padding=2, **more)
    yield engine.verify([one, two], 3, **more)
    yield engine.draft_extend([two, one], 3, **more)


@pytest.mark.parametrize("split", [True, False])
def test_every_mode(split):
    assert max(served(LatentEngine(split=split, **DRAFTS))) < BUDGET


def test_the_lse_is_natural():
    assert max(served(LatentEngine(**DRAFTS), lse=True)) < BUDGET


@pytest.mark.parametrize("page_size", [32, 64])
def test_page_sizes(page_size):
    assert max(served(LatentEngine(page_size=page_size))) < BUDGET


def test_fp8():
    assert max(served(LatentEngine(cache=torch.float8_e4m3fn, **DRAFTS))) < BUDGET


def chunks(engine):
    """Prompts in chunks, beside one that begins; each has enough new tokens to be expanded."""
    one, two = engine.request(), engine.request()
    yield engine.extend([one, two], [40, 3])
    yield engine.extend([one], [90])
    yield engine.extend([two, one, engine.request()], [100, 80, 5], extra_rows=2)
    yield engine.decode([one, two])


@pytest.mark.parametrize("cache", [torch.float32, torch.float8_e4m3fn])
def test_prompts_with_cached_tokens_come_with_expanded_keys(cache):
    engine = LatentEngine(cache=cache)
    assert max(chunks(engine)) < BUDGET
    assert engine.asked == [AttnForwardMethod.MHA] * 3 + [AttnForwardMethod.MLA]


def test_cached_tokens_are_expanded_in_several_chunks(monkeypatch):
    init = prefill.ExpandedPrefill.__init__

    def small(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.workspace_tokens = 16

    monkeypatch.setattr(prefill.ExpandedPrefill, "__init__", small)
    assert max(chunks(LatentEngine())) < BUDGET


@pytest.mark.parametrize("args", [{}, {"enable_deterministic_inference": True}])
def test_few_new_tokens_come_absorbed(args):
    engine = LatentEngine(**args)
    one = engine.request()
    new = 90 if args else 9
    assert engine.extend([one], [40]) < BUDGET
    assert engine.extend([one], [new]) < BUDGET
    assert engine.asked[-1] is AttnForwardMethod.MLA


def test_projections_with_a_scale():
    """SGLang keeps a quantised projection as two e4m3 parts with one scale."""
    engine = LatentEngine()
    wanted = engine.module.kv_b_proj.weight.unflatten(0, (HEADS, NOPE + VALUE))
    keys, values = (wanted[:, :NOPE] / 2).to(FP8), (wanted[:, NOPE:] / 2).to(FP8)
    module = SimpleNamespace(
        kv_b_proj=SimpleNamespace(weight=torch.zeros(1, dtype=FP8)),
        w_kc=keys, w_vc=values.transpose(1, 2), w_scale=2.0, use_deep_gemm_bmm=False,
    )  # fmt: skip
    assert latent.has_projections(module, torch.float32)
    found = latent.projections_of(module, torch.float32).weight
    assert (found.view_as(wanted) - wanted).abs().max() < 0.05
    module.use_deep_gemm_bmm = True
    assert not latent.has_projections(module, torch.float32)


def test_an_idle_step_has_no_rows():
    engine = LatentEngine()
    batch = engine.batch([], [], MODE.IDLE, [])
    engine.backend.init_forward_metadata(batch)
    q = torch.zeros(0, HEADS, RANK)
    out = engine.backend.forward(q, None, None, engine.mqa, batch)
    assert out.shape == (0, HEADS * RANK)


def test_the_steps_of_a_draft():
    engine = LatentEngine(speculative_num_draft_tokens=4, speculative_algorithm="EAGLE")
    drafts = draft_factory(engine, 4).create_decode_backend()
    one, two = engine.request(), engine.request()
    assert engine.extend([one, two], [37, 5]) < BUDGET
    lens = [37, 5]
    for request, length in zip((one, two), lens, strict=True):
        engine.reserve(request, length + 3)
    drafts.init_forward_metadata(engine.batch([one, two], [1, 1], MODE.DECODE, lens))
    for backend in drafts.attn_backends:
        batch = engine.batch([one, two], [1, 1], MODE.DECODE, lens)
        assert engine.run(batch, [one, two], [1, 1], 0, False, False, backend) < BUDGET
        one.length += 1
        two.length += 1


def test_expanded_keys_of_cached_tokens_are_refused():
    engine = LatentEngine()
    one = engine.request()
    counts = {"extend_seq_lens": torch.tensor([4]), "extend_seq_lens_cpu": [4]}
    counts["extend_prefix_lens_cpu"] = [0]
    batch = engine.batch([one], [4], MODE.EXTEND, [4], **counts)
    batch.attn_attend_prefix_cache = True
    with pytest.raises(NotImplementedError, match="--disable-chunked-prefix-cache"):
        engine.run(batch, [one], [4], 0, False, True, engine.backend)


def test_a_sparse_model_is_refused():
    engine = LatentEngine()
    engine.runner.model_config.hf_text_config = SimpleNamespace(index_topk=2048)
    with pytest.raises(ValueError, match="serves by one name alone"):
        type(engine.backend)(engine.runner)


def test_sglang_splits_queries_for_us():
    from sglang.srt.models.deepseek_common import utils

    assert utils.FORWARD_ABSORB_CORE_ATTENTION_BACKENDS.count("attn") == 1


def one_token_too_few(monkeypatch):
    each = latent.one_token_each
    monkeypatch.setattr(
        latent, "one_token_each", lambda batch: each(batch.replace(seq_lens=batch.seq_lens - 1))
    )


def drafts_not_counted(monkeypatch):
    lengths_of = steps.lengths_of
    monkeypatch.setattr(
        steps, "lengths_of", lambda *args: dataclasses.replace(lengths_of(*args), added=0)
    )


def rotary_part_of_other_tokens(monkeypatch):
    write = latent.LatentBackend._write

    def wrong(own, k, k_rope, *rest):
        write(own, k, k_rope.flip(0), *rest)

    monkeypatch.setattr(latent.LatentBackend, "_write", wrong)


def test_a_context_that_is_left_out_is_seen(monkeypatch):
    plan = latent.LatentBackend._plan_expanded

    def wrong(own, step):
        return dataclasses.replace(plan(own, step), context=None)

    monkeypatch.setattr(latent.LatentBackend, "_plan_expanded", wrong)
    assert not max(chunks(LatentEngine())) < 100 * BUDGET


FAULTS = [one_token_too_few, drafts_not_counted, rotary_part_of_other_tokens]


@pytest.mark.parametrize("seed", FAULTS, ids=lambda seed: seed.__name__)
def test_a_fault_is_seen(seed, monkeypatch):
    seed(monkeypatch)
    assert any(not error < 100 * BUDGET for error in served(LatentEngine(**DRAFTS)))


def test_batches_are_sglangs_own():
    engine = LatentEngine()
    assert isinstance(engine.batch([], [], MODE.IDLE, []), ForwardBatch)
