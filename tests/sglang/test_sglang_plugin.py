"""The plugin in SGLang's own loader and argument parser, and what it refuses."""

import argparse
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.layers.radix_attention import AttentionType

from tests.sglang.slot_engine import Engine, LayerSpec


def test_sglang_takes_the_name():
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    line = "--model-path x --prefill-attention-backend attn --decode-attention-backend attn"
    given = parser.parse_args([*line.split(), "--attention-backend", "attn"])
    assert given.attention_backend == given.prefill_attention_backend == "attn"
    assert given.decode_attention_backend == "attn"


LISTED = {
    "GptOssForCausalLM": {"model_type": "gpt_oss", "num_local_experts": 2},
    "Gemma3ForCausalLM": {"model_type": "gemma3_text"},
}
SPARSE = {
    "model_type": "deepseek_v32",
    "index_topk": 64,
    "index_n_heads": 4,
    "index_head_dim": 128,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
}


def arguments_of(folder, architecture, backend):
    from sglang.srt.server_args import ServerArgs

    config = {"architectures": [architecture], "dtype": "bfloat16", "num_hidden_layers": 2}
    fields = LISTED.get(architecture, SPARSE)
    (folder / "config.json").write_text(json.dumps({**config, **fields}))
    given = {"page_size": 64, "device": "cpu", "skip_tokenizer_init": True}
    args = ServerArgs(model_path=str(folder), attention_backend=backend, **given)
    if not hasattr(args, "resolve_once"):
        # 0.5.16 adjusts its arguments when they are made.
        return vars(args)
    args.resolve_once()
    return args.resolved_dict()


@pytest.mark.parametrize("architecture", LISTED)
def test_models_whose_backends_sglang_lists_take_the_name(architecture, tmp_path):
    assert arguments_of(tmp_path, architecture, "attn")["attention_backend"] == "attn"


def test_sglang_s_list_still_refuses_other_names(tmp_path):
    with pytest.raises(AssertionError, match="requires one of"):
        arguments_of(tmp_path, "GptOssForCausalLM", "flex_attention")


@pytest.fixture
def hopper(monkeypatch):
    """A GPU that SGLang asks about before any is used; what is said to processes is forgotten."""
    from attn.integrations.sglang import compat

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv(compat.TAKES_OVER, "0")


def test_a_sparse_model_is_served_by_the_name_that_sglang_asks_for(tmp_path, hopper, caplog):
    from attn.integrations.sglang import compat

    caplog.set_level("INFO")
    args = arguments_of(tmp_path, "DeepseekV32ForCausalLM", "attn")
    assert args["attention_backend"] == "dsa"
    assert args["dsa_prefill_backend"] == args["dsa_decode_backend"] == "flashmla_kv"
    assert os.environ[compat.TAKES_OVER] == "1"
    assert "takes over --attention-backend dsa" in caplog.text


def test_sglang_s_own_sparse_backend_stays_where_ours_is_not_asked_for(tmp_path, hopper):
    from attn.integrations.sglang import compat

    assert arguments_of(tmp_path, "DeepseekV32ForCausalLM", "dsa")["attention_backend"] == "dsa"
    made = compat._make_sparse(lambda one: ("theirs", one), pytest.fail, pytest.fail, "runner")
    assert made == ("theirs", "runner")


def test_our_sparse_backend_is_made_and_started_where_it_is_asked_for(monkeypatch):
    from sglang.srt.layers.attention import dsa_backend

    from attn.integrations.sglang import compat

    monkeypatch.setenv(compat.TAKES_OVER, "1")
    kept = dsa_backend.DeepseekSparseAttnBackend
    monkeypatch.setattr(dsa_backend, "DeepseekSparseAttnBackend", kept)
    given = (lambda runner: ("ours", runner)), (lambda backend: ("started", backend))
    made = compat._make_sparse(pytest.fail, lambda: given[0], given[1], "runner")
    assert made == ("started", ("ours", "runner"))
    assert dsa_backend.DeepseekSparseAttnBackend is given[0]


def test_the_plugin_registers_once():
    from attn.integrations.sglang import compat
    from attn.integrations.sglang.plugin import NAME, register

    choices = compat._choices().ATTENTION_BACKEND_CHOICES
    register()
    assert choices.count(NAME) == 1


def test_another_version_is_left_alone(monkeypatch, caplog):
    from attn.integrations.sglang import compat, plugin

    monkeypatch.setattr(compat, "version", lambda: "0.4.10")
    monkeypatch.setattr(compat, "add_choice", lambda name: pytest.fail("registered"))
    plugin.register()
    assert "serves SGLang 0.5.16 to 0.5.23, this is 0.4.10" in caplog.text


@pytest.mark.parametrize("version", ["0.5.15", "0.6.0", "0.5.24", "x"])
def test_versions_that_are_not_served(version):
    from attn.integrations.sglang import compat

    assert not compat.is_served(version)


def test_importing_the_integration_imports_no_host():
    code = (
        "import sys; import attn.integrations.sglang, attn.integrations.sglang.plugin; "
        "print({'sglang', 'vllm', 'transformers', 'torch', 'triton'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


REFUSED = {
    "pages have 1 tokens: set --page-size": {"page_size": 1},
    "pages have 256 tokens: set --page-size": {"page_size": 256},
    "leave --enable-unified-memory out": {"enable_unified_memory": True},
    "set --dcp-size 1": {"dcp_size": 2},
    "set --attention-backend triton": {"is_encoder_decoder": True},
    "set --speculative-eagle-topk 1": {
        "speculative_algorithm": "EAGLE",
        "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8,
    },
    "NGRAM verifies with a mask": {
        "speculative_algorithm": "NGRAM",
        "speculative_num_draft_tokens": 8,
    },
}


@pytest.mark.parametrize("message", REFUSED)
def test_an_engine_that_is_not_served_is_refused(message):
    with pytest.raises(ValueError, match="cannot serve this engine") as error:
        Engine(**REFUSED[message])
    assert message in str(error.value)


def test_every_reason_is_given():
    with pytest.raises(ValueError, match="--page-size") as error:
        Engine(page_size=1, dcp_size=2)
    assert "--dcp-size" in str(error.value)


def test_a_cache_that_is_not_served_is_refused():
    engine = Engine()

    class MHATokenToKVPoolFP4:
        pass

    engine.runner.token_to_kv_pool = MHATokenToKVPoolFP4()
    with pytest.raises(ValueError, match=r"MHATokenToKVPoolFP4, served are .*set --kv-cache-dtype"):
        type(engine.backend)(engine.runner)


@pytest.mark.parametrize(
    ("name", "value"),
    [("is_cross_attention", True), ("attn_type", "encoder_only"), ("pos_encoding_mode", "ROPE")],
)
def test_a_layer_that_is_not_served_is_refused(name, value):
    engine = Engine()
    setattr(engine.layers[0], name, value)
    with pytest.raises(ValueError, match="set --attention-backend triton"):
        type(engine.backend)(engine.runner)


def test_gemma_3_is_causal_whatever_sglang_calls_its_layers():
    engine = Engine()
    engine.layers[0].attn_type = AttentionType.DECODER_BIDIRECTIONAL
    config = SimpleNamespace(architectures=["Gemma3ForCausalLM"])
    engine.runner.model_config.hf_config = config
    type(engine.backend)(engine.runner)
    config.use_bidirectional_attention = True
    with pytest.raises(ValueError, match="attend in both directions"):
        type(engine.backend)(engine.runner)


def test_a_model_dtype_that_no_kernel_takes():
    engine = Engine([LayerSpec(size=24, size_v=24)])
    one = engine.request()
    with pytest.raises(ValueError, match="head_size"):
        engine.extend([one], [4])
    assert engine.dtype is torch.float32
