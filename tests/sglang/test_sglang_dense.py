"""Dense layers in SGLang: every mode, over every pool, against float64."""

from types import SimpleNamespace

import pytest
import torch

from tests.sglang.slot_engine import BUDGET, MODE, Engine, LayerSpec

FEATURES = {
    "plain": [LayerSpec()],
    "window": [LayerSpec(window=20)],
    "sinks": [LayerSpec(sinks=True), LayerSpec(sinks=True, window=20)],
    "soft cap": [LayerSpec(cap=4.0)],
    "value size": [LayerSpec(size=64, size_v=32)],
    "shared keys": [LayerSpec(), LayerSpec(shares=0, window=9)],
    "several kinds": [LayerSpec(), LayerSpec(window=20, sinks=True), LayerSpec(heads=(2, 2))],
}


def served(engine, lse=False):
    """Prefills, a chunk, a mixed step, decodes, a verify and what follows; the largest error."""
    one, two, three = (engine.request() for _ in range(3))
    more = {"lse": lse}
    yield engine.extend([one, two], [37, 5], **more)
    yield engine.extend([one], [24], extra_rows=3, **more)
    yield engine.decode([two, one], **more)
    yield engine.extend([three, two, one], [19, 1, 1], mode=MODE.MIXED, **more)
    yield engine.decode([one, three], padding=2, **more)
    yield engine.verify([one, two], 3, **more)
    yield engine.draft_extend([two, one], 3, **more)
    yield engine.decode([two], **more)


@pytest.mark.parametrize("feature", FEATURES)
def test_every_mode(feature):
    engine = Engine(
        FEATURES[feature], speculative_num_draft_tokens=3, speculative_algorithm="EAGLE"
    )
    assert max(served(engine)) < BUDGET


@pytest.mark.parametrize("page_size", [32, 64, 128])
def test_every_page_size(page_size):
    engine = Engine([LayerSpec(window=40)], page_size=page_size)
    assert max(served(engine)) < BUDGET


APART = [LayerSpec(), LayerSpec(window=40), LayerSpec(window=40, sinks=True)]


def test_windows_in_a_pool_of_their_own():
    engine = Engine(
        APART, windows_apart=True, speculative_num_draft_tokens=3, speculative_algorithm="EAGLE"
    )
    assert max(served(engine)) < BUDGET


def test_pages_behind_the_window_are_freed():
    engine = Engine(APART, windows_apart=True)
    one, two = engine.request(), engine.request()
    errors = [engine.extend([one, two], [100, 7])]
    engine.forget(one, 100 - 40)
    errors += [engine.decode([two, one]), engine.extend([one], [20])]
    assert max(errors) < BUDGET


@pytest.mark.parametrize("cache", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_fp8_with_scales(cache):
    layers = [LayerSpec(scales=(0.5, 2.0)), LayerSpec(scales=(0.25, 1.0), window=20)]
    assert max(served(Engine(layers, cache=cache))) < BUDGET


def test_sixteen_bits():
    engine = Engine([LayerSpec()], cache=torch.bfloat16, dtype=torch.bfloat16)
    assert max(served(engine)) < 2**-6


def test_the_lse_is_natural():
    assert max(served(Engine(FEATURES["sinks"]), lse=True)) < BUDGET


def test_deterministic():
    assert max(served(Engine(enable_deterministic_inference=True))) < BUDGET


def test_an_idle_step_has_no_rows():
    engine = Engine()
    batch = engine.batch([], [], MODE.IDLE, [])
    assert engine.run(batch, [], [], 0, False, True, engine.backend) == 0.0
    assert engine.backend.forward_metadata is None


def test_a_step_beyond_the_limits_gets_larger_buffers():
    engine = Engine(chunked_prefill_size=16)
    one = engine.request()
    assert engine.extend([one], [9]) < BUDGET
    assert engine.extend([one], [270]) < BUDGET


def test_slots_that_do_not_fit_the_cache_are_not_read():
    """Padding of a graph reads slot 0 and writes it."""
    engine = Engine()
    one = engine.request()
    engine.extend([one], [30])
    assert engine.decode([one], padding=5) < BUDGET


def addresses(value, seen):
    """Addresses of all tensors of a record."""
    if isinstance(value, torch.Tensor):
        seen.append((value.data_ptr(), tuple(value.shape)))
    elif hasattr(value, "__dataclass_fields__"):
        for name in value.__dataclass_fields__:
            if name not in ("slot_mapping", "full", "window", "written"):
                addresses(getattr(value, name), seen)
    elif isinstance(value, dict):
        for one in value.values():
            addresses(one, seen)
    return seen


@pytest.mark.parametrize("mode", ["decode", "verify"])
def test_a_graph_plans_itself(mode):
    """What a capture sees keeps its address, and nothing is left to do outside of the graph."""
    engine = Engine(
        APART, windows_apart=True, speculative_num_draft_tokens=3, speculative_algorithm="EAGLE"
    )
    engine.backend.init_cuda_graph_state(8, 32)
    one, two = engine.request(), engine.request()
    engine.extend([one, two], [37, 5])
    run = engine.decode if mode == "decode" else lambda reqs: engine.verify(reqs, 3)
    assert run([one, two]) < BUDGET
    captured = addresses(engine.backend.forward_metadata, [])
    assert run([two, one]) < BUDGET
    assert addresses(engine.backend.forward_metadata, []) == captured
    before = engine.backend.forward_metadata
    engine.backend.init_forward_metadata_out_graph(None, in_capture=True)
    assert engine.backend.forward_metadata is before


def test_no_host_length_is_read():
    engine = Engine()
    one = engine.request()
    engine.extend([one], [20])
    batch = engine.batch([one], [1], MODE.DECODE, [21])
    assert batch.seq_lens_cpu is None
    assert batch.seq_lens_sum is None
    assert not engine.backend.needs_cpu_seq_lens
    engine.backend.update_verify_buffers_to_fill_after_draft(None, None)


def draft_factory(engine, steps):
    """SGLang's own factory of draft backends, as its workers make it."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    factory = object.__new__(DraftBackendFactory)
    factory.__dict__.update(
        draft_model_runner=engine.runner,
        topk=1,
        speculative_num_steps=steps,
        draft_attn_backend="attn",
        server_args=engine.runner.server_args,
        qsa_profile=None,
        seed_dsa_topk_from_draft_extend=False,
    )
    return factory


@pytest.mark.parametrize("apart", [False, True])
def test_the_steps_of_a_draft(apart):
    layers = APART if apart else [LayerSpec(), LayerSpec(window=20)]
    engine = Engine(
        layers, windows_apart=apart, speculative_num_draft_tokens=4, speculative_algorithm="EAGLE"
    )
    factory = draft_factory(engine, 4)
    assert isinstance(factory.create_draft_extend_backend(), type(engine.backend))
    drafts = factory.create_decode_backend()
    one, two = engine.request(), engine.request()
    assert engine.extend([one, two], [37, 5]) < BUDGET
    lens = [37, 5]
    for one_req, length in zip((one, two), lens, strict=True):
        engine.reserve(one_req, length + 3)
    first = engine.batch([one, two], [1, 1], MODE.DECODE, lens)
    drafts.init_forward_metadata(first)
    for step, backend in enumerate(drafts.attn_backends):
        assert backend.draft_step == step
        batch = engine.batch([one, two], [1, 1], MODE.DECODE, lens)
        error = engine.run(batch, [one, two], [1, 1], 0, False, False, backend)
        assert error < BUDGET
        one.length += 1
        two.length += 1


def test_a_draft_of_another_backend_is_made_by_sglang(monkeypatch):
    from sglang.srt.speculative import draft_utils

    if hasattr(draft_utils, "attention_backends"):
        monkeypatch.setattr(draft_utils, "attention_backends", lambda: ("attn", "attn"))
    engine = Engine()
    engine.runner.model_config.hf_config = None
    factory = draft_factory(engine, 4)
    factory.draft_attn_backend = "no such backend"
    with pytest.raises(ValueError, match="EAGLE is not supported"):
        factory.create_decode_backend()


@pytest.mark.parametrize("name", ["idx_q", "score_mod", "topk_indices"])
def test_an_unknown_argument_is_refused(name):
    engine = Engine()
    one = engine.request()
    batch = engine.batch(
        [one],
        [4],
        MODE.EXTEND,
        [4],
        **{"extend_seq_lens": torch.tensor([4]), "extend_seq_lens_cpu": [4]},
    )
    engine.backend.init_forward_metadata(batch)
    q = torch.zeros(4, 128)
    with pytest.raises(NotImplementedError, match=f"does not serve {name}"):
        engine.backend.forward(
            q, q[:, :64], q[:, :64], engine.layers[0], batch, **{name: torch.zeros(1)}
        )


def test_a_kind_of_step_that_is_not_served():
    engine = Engine()
    one = engine.request()
    with pytest.raises(NotImplementedError, match="DLLM_EXTEND"):
        engine.step([one], [4], MODE.DLLM_EXTEND, [4], spec_info=SimpleNamespace())
