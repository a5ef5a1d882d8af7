"""Warm-ups: what is launched in serving was launched before, and the cache is as it was."""

import pytest
import torch

from attn.integrations.sglang.backend import started
from builders.launch.call import KernelCall
from tests.sglang import test_sglang_latent as latent
from tests.sglang import test_sglang_sparse as sparse
from tests.sglang.slot_engine import Engine, LayerSpec
from tests.sglang.test_sglang_latent import no_arguments
from tests.sglang.test_sglang_sparse import one_rank
from tests.tools.interpreter import variant_of

__all__ = ["no_arguments", "one_rank"]


class Attention(torch.nn.Module):
    """A model's module around a layer, as gpt-oss has it."""

    def __init__(self, layer, sinks):
        super().__init__()
        self.attn, self.sinks = layer, sinks


@pytest.fixture
def launched(monkeypatch):
    launches = []
    launch = KernelCall.launch_through_triton

    def noted(call):
        launches.append(call)
        launch(call)

    monkeypatch.setattr(KernelCall, "launch_through_triton", noted)
    return launches


def dense():
    full = {"heads": (4, 2), "size": 32}
    specs = [LayerSpec(**full, sinks=True), LayerSpec(**full, window=9, sinks=True)]
    engine = Engine(specs, windows_apart=True)
    pairs = zip(engine.layers, engine.sinks, strict=True)
    engine.backend.model = torch.nn.ModuleList([Attention(*pair) for pair in pairs])
    return engine, engine.pool.full_kv_pool.k_buffer[0]


def of_latent():
    engine = latent.LatentEngine()
    return engine, engine.pool.kv_buffer[0]


def of_sparse():
    engine = sparse.SparseEngine()
    return engine, engine.pool.kv_buffer[0]


@pytest.mark.parametrize("make", [dense, of_latent, of_sparse])
def test_serving_after_a_warm_up_meets_no_new_variant(make, launched):
    engine, cache = make()
    kept = cache.view(torch.uint8).clone()
    engine.backend.warm_up()
    assert torch.equal(cache.view(torch.uint8), kept)
    known = {variant_of(call) for call in launched}
    launched.clear()
    one, two = engine.request(), engine.request()
    engine.extend([one, two], [37, 5])
    engine.decode([two, one])
    engine.extend([one], [90])
    engine.extend([two], [6])
    assert launched
    assert {variant_of(call) for call in launched} <= known


def test_backends_are_warmed_up_on_a_gpu_alone(monkeypatch):
    engine, _ = dense()
    monkeypatch.setattr(engine.backend, "warm_up", lambda: pytest.fail("there is no GPU"))
    assert started(engine.backend) is engine.backend
