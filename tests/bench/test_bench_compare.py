"""The comparison of engines without an engine: loads, goals, verdicts, merging, and the page."""

import json
import os
import sys

import pytest

from attn.bench.engine import compare as bench
from attn.bench.engine.compare import (
    CompareSettings,
    Engine,
    EngineError,
    compare,
    load_comparisons,
    main,
    merged_files,
    vllm_words,
)
from attn.bench.engine.compare_worker import Request, engine_options
from attn.bench.engine.engine import EngineEnvironment, Speed
from attn.bench.engine.parts import (
    KernelTime,
    PartName,
    kernel_times,
    own_times,
    part_of,
    time_of,
)
from attn.bench.engine.rows import (
    Comparison,
    Comparisons,
    Judgement,
    Profile,
    Row,
    judge,
    rate_of,
    render,
    render_kernels,
)
from attn.bench.engine.shapes import (
    CUSTOM,
    CUSTOM_ROWS,
    FLASH_MLA_3,
    FLASH_SPARSE,
    FLASHMLA,
    FLASHMLA_SPARSE,
    MAX_MODEL_LEN,
    MODELS,
    TRITON_MLA,
    Contender,
    Measure,
    select_models,
)

ENVIRONMENT = EngineEnvironment(
    date="2026-11-27",
    device="NVIDIA H200",
    torch="2.11.0+cu130",
    triton="3.6.0",
    vllm="0.26.0",
    commit="0123456789ab",
)
LATENT, SPARSE = MODELS["deepseek-v3-16"], MODELS["deepseek-v32-16"]


def kernel(name, us):
    return KernelTime(name=name, count=1, us=us)


def row(model, contender, seconds=1.0, attention=1000.0, start_up=30.0, spread=0.0, **fields):
    """A contender: its loads take ``seconds`` each, its attention ``attention`` microseconds."""
    rounds = (seconds * (1 - spread / 2), seconds, seconds * (1 + spread / 2))
    kernels = (kernel("hopper_narrow_sparse_kernel", attention), kernel("nvjet_gemm", 5000.0))
    values = {
        "start_ups": (start_up,),
        "speeds": tuple(Speed(workload=load.name, seconds=rounds) for load in model.loads),
        "profiles": tuple(Profile(load=load.name, kernels=kernels) for load in model.loads[:2]),
    }
    return Row(model=model.name, contender=contender, **{**values, **fields})


def comparison(model, *rows, **fields):
    values = {"environment": ENVIRONMENT, "rounds": 3, "loads": model.loads}
    return Comparison(model=model.name, rows=rows, **{**values, **fields})


def verdicts(found, model):
    return {goal.text: judge(found, goal)[1] for goal in model.goals}


# -- Models.


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_a_models_goals_are_of_its_contenders_and_loads(model):
    loads = {load.name for load in model.loads}
    for goal in model.goals:
        assert {goal.ours, *goal.rivals} <= set(model.contenders)
        assert goal.ours.backend == "CUSTOM"
        assert goal.load in loads or goal.measure is Measure.START_UP
        if goal.measure is Measure.ATTENTION:
            assert goal.load in {load.name for load in model.loads[:2]}
    assert all(load.prompt_len + load.output_len <= MAX_MODEL_LEN for load in model.loads)
    # A cached prompt ends one token after a block, so that all its blocks are read again.
    assert all(load.prompt_len % 64 == 1 for load in model.loads if load.is_cached)


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS)
def test_all_engines_of_a_model_fit_one_gpu(model):
    """Weights in bf16 and caches of all contenders leave room on a card of 78 GiB."""
    config = model.config
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    heads = config["num_attention_heads"]
    if "kv_lora_rank" in config:
        attention = hidden * (1536 + 576) + 1536 * heads * 192 + 512 * heads * 256
        attention += heads * 128 * hidden
        attention += 1536 * 64 * 128 + hidden * (128 + 64) if "index_topk" in config else 0
        row_bytes = 1152 + (132 if "index_topk" in config else 0)
    else:
        width = config.get("head_dim", 128)
        attention = hidden * width * (2 * heads + 2 * config["num_key_value_heads"])
        row_bytes = 4 * width * config["num_key_value_heads"]
    layers = config["num_hidden_layers"]
    weights = layers * (attention + 3 * hidden * inner) + 2 * config["vocab_size"] * hidden
    # A process has a context and workspaces besides: 4 GiB.
    each = 2 * weights / 2**30 + model.kv_cache_gib + 4
    assert len(model.contenders) * each < 78
    # Cached prompts stay cached while the other loads of a round run.
    tokens = sum(load.num_prompts * (load.prompt_len + load.output_len) for load in model.loads)
    assert tokens * row_bytes * layers < model.kv_cache_gib * 2**30


def test_the_issue_of_sparse_layers_is_attention_and_the_whole():
    assert [goal.text for goal in SPARSE.goals] == [
        "attention of prefill: CUSTOM, fp8_ds_mla >= 1.20 x FLASHMLA_SPARSE, fp8_ds_mla",
        "attention of decode: CUSTOM, fp8_ds_mla >= 1.20 x FLASHMLA_SPARSE, fp8_ds_mla",
        "prefill: CUSTOM, fp8_ds_mla >= 1.00 x FLASHMLA_SPARSE, fp8_ds_mla",
        "decode: CUSTOM, fp8_ds_mla >= 1.00 x FLASHMLA_SPARSE, fp8_ds_mla",
        "long: CUSTOM, fp8_ds_mla >= 1.00 x FLASHMLA_SPARSE, fp8_ds_mla",
        "attention of prefill: CUSTOM >= 1.00 x FLASH_ATTN_MLA_SPARSE",
        "attention of decode: CUSTOM >= 1.00 x FLASH_ATTN_MLA_SPARSE",
        "prefill: CUSTOM >= 1.00 x FLASH_ATTN_MLA_SPARSE",
        "decode: CUSTOM >= 1.00 x FLASH_ATTN_MLA_SPARSE",
        "long: CUSTOM >= 1.00 x FLASH_ATTN_MLA_SPARSE",
    ]
    assert [goal.text for goal in LATENT.goals][-1] == "start-up of CUSTOM <= 1.00 x TRITON_MLA"


def test_models_and_contenders_are_chosen_by_name():
    assert select_models(()) == tuple(MODELS.values())
    assert [item.name for item in select_models(("llama", "deepseek-v3-16"))] == [
        "deepseek-v3-16",
        "llama",
    ]
    with pytest.raises(ValueError, match="got 'bert'"):
        select_models(("bert",))
    settings = CompareSettings(backends=("CUSTOM",), caches=("fp8_ds_mla",))
    assert settings.contenders(SPARSE) == (CUSTOM_ROWS,)
    assert CompareSettings().contenders(SPARSE) == SPARSE.contenders
    with pytest.raises(ValueError, match="rounds must be positive"):
        CompareSettings(rounds=0)


def test_an_engine_has_the_contenders_backend_and_cache():
    options = engine_options(SPARSE, CUSTOM_ROWS)
    assert (options["attention_backend"], options["kv_cache_dtype"]) == ("CUSTOM", "fp8_ds_mla")
    assert options["kv_cache_memory_bytes"] == SPARSE.kv_cache_gib * 2**30
    assert max(load.num_prompts for load in SPARSE.loads) <= options["max_num_seqs"]


# -- Parts.


@pytest.mark.parametrize(
    ("name", "part"),
    [
        ("hopper_narrow_sparse_kernel", PartName.ATTENTION),
        ("dequantise_kernel", PartName.ATTENTION),
        ("dequantised_pages_kernel", PartName.ATTENTION),
        ("void cutlass::device_kernel<flash::enable_sm90<flash::FlashAttnFwdSm90<", "attention"),
        ("void sm90::decode::sparse_fp8::flash_fwd_splitkv_mla_fp8_sparse_kernel<", "attention"),
        ("_convert_req_index_to_global_index_kernel", PartName.ATTENTION),
        ("void vllm::concat_and_cache_mla_kernel<", PartName.ATTENTION),
        ("mla_decode_kernel", PartName.ATTENTION),
        ("_fwd_grouped_kernel_stage1", PartName.ATTENTION),
        ("hopper_paged_logits_kernel", PartName.INDEXER),
        ("select_topk_kernel", PartName.INDEXER),
        ("sm90_fp8_paged_mqa_logits", PartName.INDEXER),
        ("void vllm::topKPerRowDecode<512, true>", PartName.INDEXER),
        ("void vllm::persistent::persistent_topk_kernel<", PartName.INDEXER),
        ("void vllm::indexer_k_quant_and_cache_kernel<", PartName.INDEXER),
        ("_fused_indexer_q_rope_quant_kernel", PartName.INDEXER),
        ("void vllm::filtered_topk::FilteredTopKUnifiedKernel<float, int, 4, 2048u, f", "indexer"),
        ("_build_prefill_chunk_metadata_kernel", PartName.INDEXER),
        ("void vllm::ConcatMLAQKernel<c10::BFloat16, 512>(c10::BFloat16*, ", PartName.ATTENTION),
        ("nvjet_tst_192x192_64x4_1x2_h_bz_coopB_TNT", PartName.OTHER),
        ("triton_poi_fused_mul_silu_slice_1", PartName.OTHER),
        ("triton_red_fused_index_rms_norm_0", PartName.OTHER),
        ("void at::native::vectorized_elementwise_kernel<4, at::native::FillFunctor", "other"),
    ],
)
def test_a_kernels_name_tells_its_part(name, part):
    assert part_of(name) == part


def test_times_are_added_up_by_name_and_part():
    found = kernel_times(
        [("gemm", 0.0, 3.0), ("mla_decode_kernel", 3.0, 5.0), ("gemm", 6.0, 7.5)],
    )
    assert found == (
        KernelTime(name="gemm", count=2, us=4.5),
        KernelTime(name="mla_decode_kernel", count=1, us=2.0),
    )
    assert time_of(found, PartName.ATTENTION) == 2.0
    assert time_of(found, PartName.INDEXER) == 0.0


def test_a_kernel_is_charged_the_time_in_which_no_earlier_one_ran():
    launches = [
        # It was launched ahead, and waited for the kernel before it.
        ("fold_states_kernel", 11.0, 22.0),
        ("hopper_narrow_sparse_kernel", 10.0, 20.0),
        # It ended before the kernel before it did.
        ("clear_kernel", 12.0, 14.0),
        ("gemm", 21.0, 30.0),
        ("gemm", 40.0, 41.0),
    ]
    assert list(own_times(launches)) == [
        ("hopper_narrow_sparse_kernel", 10.0),
        ("fold_states_kernel", 2.0),
        ("clear_kernel", 0.0),
        ("gemm", 8.0),
        ("gemm", 1.0),
    ]
    # All together they are the time in which the GPU was busy.
    assert sum(item.us for item in kernel_times(launches)) == 21.0


# -- Verdicts.


def latent_rows(**ours):
    peers = (row(LATENT, FLASH_MLA_3), row(LATENT, FLASHMLA, 1.2), row(LATENT, TRITON_MLA, 2.0))
    return (*peers, row(LATENT, CUSTOM, **ours))


def test_the_fastest_rival_is_the_bound():
    found = comparison(LATENT, *latent_rows(seconds=0.9, start_up=29.0))
    assert set(verdicts(found, LATENT).values()) == {Judgement.MET}
    slower = comparison(LATENT, *latent_rows(seconds=1.1, start_up=29.0))
    assert list(verdicts(slower, LATENT).values()) == [Judgement.NOT_MET] * 3 + [Judgement.MET]
    ratio, _ = judge(slower, LATENT.goals[0])
    assert ratio == pytest.approx(1 / 1.1)


@pytest.mark.parametrize("seconds", [0.97, 1.03])
def test_a_lead_or_a_lag_within_the_larger_spread_is_level(seconds):
    found = comparison(LATENT, *latent_rows(seconds=seconds, spread=0.05, start_up=29.0))
    assert list(verdicts(found, LATENT).values())[:3] == [Judgement.LEVEL] * 3
    sharp = comparison(LATENT, *latent_rows(seconds=seconds, spread=0.01, start_up=29.0))
    expected = Judgement.MET if seconds < 1 else Judgement.NOT_MET
    assert list(verdicts(sharp, LATENT).values())[:3] == [expected] * 3


def test_a_start_up_is_judged_by_its_seconds():
    assert judge(comparison(LATENT, *latent_rows(start_up=31.0)), LATENT.goals[-1]) == (
        pytest.approx(31 / 30),
        Judgement.NOT_MET,
    )


def test_start_ups_within_their_spread_are_level():
    def starts(*ours):
        rival = row(LATENT, TRITON_MLA, start_ups=(30.0, 30.6))
        return comparison(LATENT, rival, row(LATENT, CUSTOM, start_ups=ours))

    for ours, expected in (
        ((30.0, 31.0), Judgement.LEVEL),
        ((33.0, 33.5), Judgement.NOT_MET),
        ((27.0, 27.5), Judgement.MET),
    ):
        assert judge(starts(*ours), LATENT.goals[-1])[1] == expected
    page = render(Comparisons(models=(starts(29.0, 31.0, 32.0),)))
    assert "| CUSTOM | 31.0 | 9.7 % | beside the others, 3 times |" in page


def sparse_rows(ours_us):
    return (
        row(SPARSE, FLASH_SPARSE),
        row(SPARSE, CUSTOM),
        row(SPARSE, FLASHMLA_SPARSE, 1.1, attention=1200.0),
        row(SPARSE, CUSTOM_ROWS, attention=ours_us),
    )


@pytest.mark.parametrize(
    ("ours_us", "verdict"), [(990.0, Judgement.MET), (1010.0, Judgement.NOT_MET)]
)
def test_attention_is_judged_by_its_kernels(ours_us, verdict):
    found = judge(comparison(SPARSE, *sparse_rows(ours_us)), SPARSE.goals[1])
    assert found == (pytest.approx(1200 / ours_us), verdict)


def test_what_is_missing_leaves_a_goal_open_and_a_failure_of_ours_misses_it():
    rows = latent_rows(seconds=0.9, start_up=29.0)
    without = comparison(LATENT, *rows[1:])
    assert judge(without, LATENT.goals[0])[1] is Judgement.NOT_MEASURED
    # A rival that is there and faster decides it already.
    lost = comparison(LATENT, rows[0], row(LATENT, CUSTOM, 1.5))
    assert judge(lost, LATENT.goals[0])[1] is Judgement.NOT_MET
    failed = Row(model=LATENT.name, contender=FLASHMLA, error="RuntimeError: no FlashMLA")
    beaten = comparison(LATENT, rows[0], failed, *rows[2:])
    assert judge(beaten, LATENT.goals[0])[1] is Judgement.MET
    ours = Row(model=LATENT.name, contender=CUSTOM, error="RuntimeError: no")
    assert set(verdicts(comparison(LATENT, *rows[:3], ours), LATENT).values()) == {
        Judgement.NOT_MET
    }
    assert set(verdicts(None, LATENT).values()) == {Judgement.NOT_MEASURED}
    assert set(verdicts(comparison(LATENT), LATENT).values()) == {Judgement.NOT_MEASURED}


def test_one_slow_round_among_many_does_not_make_a_lead_level():
    seconds = (0.9, 0.909, 0.891, 0.9, 1.35, 0.891, 0.909, 0.9)
    speeds = tuple(Speed(workload=load.name, seconds=seconds) for load in LATENT.loads)
    assert speeds[0].quartile_spread == pytest.approx(0.0125)
    peers = [row(LATENT, item) for item in (FLASH_MLA_3, FLASHMLA, TRITON_MLA)]
    found = comparison(LATENT, *peers, row(LATENT, CUSTOM, start_up=29.0, speeds=speeds))
    assert judge(found, LATENT.goals[0])[1] is Judgement.MET
    # All of a few rounds count.
    assert Speed(workload="x", seconds=(*[1.0] * 6, 2.0)).quartile_spread == 1.0


def test_only_cached_loads_are_repeated():
    assert [load.repeats for load in LATENT.loads] == [1, 2, 1]
    with pytest.raises(ValueError, match="repeats of new prompts must be 1, got 2"):
        LATENT.loads[0].replace(repeats=2)


# -- Merging.


def test_rows_of_later_files_replace_earlier_ones_unless_they_failed(tmp_path):
    first = comparison(LATENT, row(LATENT, FLASHMLA, 1.0), row(LATENT, CUSTOM, 1.0))
    failed = Row(model=LATENT.name, contender=FLASHMLA, error="no")
    later = comparison(
        LATENT,
        failed,
        row(LATENT, CUSTOM, 2.0),
        row(LATENT, TRITON_MLA),
        environment=ENVIRONMENT.replace(commit="fedcba987654"),
    )
    other = comparison(SPARSE, *sparse_rows(1000.0))
    paths = []
    for index, found in enumerate((first, later, other)):
        paths.append(tmp_path / f"{index}.json")
        paths[-1].write_text(Comparisons(models=(found,)).model_dump_json())
    whole = merged_files(paths)
    assert [item.model for item in whole.models] == [LATENT.name, SPARSE.name]
    merged = whole.of(LATENT.name)
    assert [item.contender for item in merged.rows] == [FLASHMLA, TRITON_MLA, CUSTOM]
    assert merged.row(FLASHMLA).error == ""
    assert rate_of(merged.row(CUSTOM), LATENT.loads[0]) == pytest.approx(16 * 4096 / 2)
    assert merged.environment.commit == "0123456789ab, fedcba987654"
    with pytest.raises(ValueError, match="must have device"):
        later.replace(environment=ENVIRONMENT.replace(device="NVIDIA H100")).merged(first)
    with pytest.raises(ValueError, match="must be of"):
        other.merged(first)


def test_results_of_other_loads_are_refused(tmp_path):
    """Their seconds over this version's tokens would be wrong rates."""
    shorter = (*LATENT.loads[:1], LATENT.loads[1].replace(output_len=128), *LATENT.loads[2:])
    path = tmp_path / "old.json"
    for loads in (shorter, ()):
        found = comparison(LATENT, row(LATENT, CUSTOM), loads=loads)
        path.write_text(Comparisons(models=(found,)).model_dump_json())
        with pytest.raises(ValueError, match="deepseek-v3-16 are of other loads: measure again"):
            load_comparisons(path)


def test_a_start_up_measured_alone_is_kept_beside_speeds():
    speeds = comparison(LATENT, row(LATENT, CUSTOM, 2.0, start_up=50.0))
    alone = row(LATENT, CUSTOM, start_up=20.0, starts_alone=True, speeds=(), profiles=())
    for first, later in ((speeds, comparison(LATENT, alone)), (comparison(LATENT, alone), speeds)):
        whole = later.replace(rounds=16 if later is speeds else 5).merged(
            first.replace(rounds=16 if first is speeds else 5)
        )
        assert whole.rounds == 16
        merged = whole.row(CUSTOM)
        assert (merged.start_up_s, merged.starts_alone) == (20.0, True)
        assert merged.speed("decode").median == 2.0
        assert merged.profile("decode") is not None
    again = row(LATENT, CUSTOM, start_up=23.0, starts_alone=True, speeds=(), profiles=())
    both = comparison(LATENT, again).merged(later.merged(first))
    assert both.row(CUSTOM).start_ups == (20.0, 23.0)
    assert both.row(CUSTOM).start_up_s == 21.5
    elsewhere = comparison(LATENT, again.replace(cores=8))
    assert elsewhere.merged(both).row(CUSTOM).start_ups == (23.0,)
    assert speeds.merged(elsewhere).row(CUSTOM).cores == 8
    failed = comparison(LATENT, Row(model=LATENT.name, contender=CUSTOM, error="no"))
    assert speeds.merged(failed).row(CUSTOM) == speeds.row(CUSTOM)
    assert failed.merged(speeds).row(CUSTOM) == speeds.row(CUSTOM)


# -- The page.


def test_the_page_shows_every_number_and_every_failure():
    failed = Row(
        model=SPARSE.name,
        contender=FLASHMLA_SPARSE,
        error="exit code 1: RuntimeError: DeepGEMM is missing",
        vllm_line="ERROR engine core failed",
        compiled=("_C_stable_libtorch.abi3.so",),
    )
    rows = sparse_rows(1000.0)
    text = render(Comparisons(models=(comparison(SPARSE, rows[0], rows[1], failed, rows[3]),)))
    assert text.startswith("# Engines of vLLM 0.26.0 on NVIDIA H200\n")
    decode = "decode: 64 x (8193 cached + 256 out), out tok/s"
    assert f"| {decode} | CUSTOM | 16384 | 0.0 % | 1.000 | 1.0 | 0.0 |" in text
    assert f"| {decode} | FLASHMLA_SPARSE, fp8_ds_mla | failed |  |  |  |  |" in text
    assert "- FLASHMLA_SPARSE, fp8_ds_mla: `exit code 1: RuntimeError: DeepGEMM is missing`" in text
    assert "  - vLLM: `ERROR engine core failed`" in text
    assert "  - installed: _C_stable_libtorch.abi3.so" in text
    assert "beside the others" in text
    assert all(goal.text in text for goal in SPARSE.goals)
    counted = text.split("Goals: ")[1].split(".")[0]
    assert sum(int(part.split()[0]) for part in counted.split(", ")) == len(SPARSE.goals)
    # Other models are named in one line.
    others = [model for model in MODELS.values() if model is not SPARSE]
    assert text.endswith(f"Not measured: {'; '.join(model.title for model in others)}.\n")
    assert not [model for model in others if f"## {model.title}\n" in text]


def test_the_kernels_of_each_part_can_be_read():
    text = render_kernels(Comparisons(models=(comparison(SPARSE, *sparse_rows(1000.0)),)))
    assert "## deepseek-v32-16, CUSTOM, prefill" in text
    assert "| attention | 1.00 | 1 | `hopper_narrow_sparse_kernel` |" in text
    assert "| other | 5.00 | 1 | `nvjet_gemm` |" in text


def test_no_results_render_too():
    for found in (Comparisons(), Comparisons(models=(comparison(SPARSE),))):
        text = render(found)
        assert text.startswith("# Engines of vLLM: no results\n")
        assert all(model.title in text.splitlines()[-1] for model in MODELS.values())


# -- Processes.

FAKE = """
import json, os, sys
folder = sys.argv[1]
job = json.load(open(folder + "/job.json"))
backend = job["contender"]["backend"]
print("INFO Using", backend, "attention backend")
if backend == "FLASHMLA":
    raise RuntimeError("no such kernel")
out = os.fdopen(int(os.environ["ATTN_ANSWERS"]), "w")
def answer(**fields):
    out.write(json.dumps(fields) + "\\n"); out.flush()
cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
print("cores", cores, flush=True)
answer(environment={"device": "a GPU"}, start_up_s=1.5)
for line in sys.stdin:
    asked = json.loads(line)
    if asked["profiles"]:
        answer(kernels=[{"name": "mla_decode_kernel", "count": 2, "us": 10.0}])
    elif backend == "TRITON_MLA" and asked["seed"] == 2:
        raise ValueError("outputs must vary")
    else:
        answer(seconds=0.5 + asked["seed"])
"""


@pytest.fixture
def fake(tmp_path, monkeypatch):
    """Processes that answer without an engine."""
    (tmp_path / "fake_worker.py").write_text(FAKE)
    real = bench.subprocess.Popen

    def popen(command, **options):
        return real([sys.executable, str(tmp_path / "fake_worker.py"), command[-1]], **options)

    monkeypatch.setattr(bench.subprocess, "Popen", popen)
    monkeypatch.setattr(bench, "require_engine", lambda: None)
    return tmp_path


def test_engines_are_asked_in_turn_and_failures_are_told(fake):
    lines = []
    settings = CompareSettings(rounds=3, answer_s=30.0, logs=fake)
    steps = list(compare(LATENT, settings, lines.append))
    final = steps[-1]
    assert [item.contender for item in final.rows] == list(LATENT.contenders)
    flash, flashmla, triton, ours = final.rows
    # A round asks for decodes twice, once in either order.
    assert ours.speed("decode").seconds == (1.5, 1.5, 2.5, 2.5, 3.5, 3.5)
    assert ours.speed("prefill").seconds == (1.5, 2.5, 3.5)
    decodes = [line for line in lines if "round 1" in line and "decode" in line]
    names = [line.split(",")[1].strip() for line in decodes]
    assert names == [*names[:3], *names[2::-1]]
    assert ours.start_up_s == flash.start_up_s == 1.5
    assert ours.profile("prefill").ms(PartName.ATTENTION) == pytest.approx(0.01)
    assert ours.profile("long") is None
    assert flashmla.error == "exit code 1: RuntimeError: no such kernel"
    assert flashmla.vllm_line == "INFO Using FLASHMLA attention backend"
    assert triton.error == "exit code 1: ValueError: outputs must vary"
    assert triton.speed("prefill").seconds == (1.5,)
    assert final.environment.device == "a GPU"
    # Every other round goes the other way, so that each engine follows each.
    order = [line.split(",")[1].strip() for line in lines if "round" in line and "prefill" in line]
    assert order[:3] == ["CUSTOM", "TRITON_MLA", "FLASH_ATTN_MLA"]
    assert order[3:6] == ["FLASH_ATTN_MLA", "TRITON_MLA", "CUSTOM"]
    assert len(steps) == 4 + 4 + 2


def test_start_ups_alone_are_one_after_another(fake):
    settings = CompareSettings(
        starts_alone=True, only_starts=True, backends=("CUSTOM", "TRITON_MLA"), answer_s=30.0
    )
    final = list(compare(LATENT, settings, lambda line: None))[-1]
    assert [item.start_up_s for item in final.rows] == [1.5, 1.5]
    assert all(item.starts_alone for item in final.rows)
    assert not any(item.speeds for item in final.rows)


def test_start_ups_on_cores_of_their_own_are_at_once_and_add_up(fake):
    if len(before := os.sched_getaffinity(0)) < 2:
        pytest.skip("one core")
    settings = CompareSettings(
        only_starts=True,
        own_cores=True,
        backends=("CUSTOM", "TRITON_MLA"),
        answer_s=30.0,
        logs=fake,
    )
    first, again = (list(compare(LATENT, settings, lambda line: None))[-1] for _ in range(2))
    assert os.sched_getaffinity(0) == before
    both = again.merged(first)
    assert [item.start_ups for item in both.rows] == [(1.5, 1.5)] * 2
    each = len(before) // 2
    assert [item.cores for item in both.rows] == [each] * 2
    assert f"on {each} cores of its own, 2 times" in render(Comparisons(models=(both,)))
    logs = [(fake / f"{LATENT.name}-{name}-auto.log").read_text() for name in settings.backends]
    of = [{*map(int, log.split("cores ")[1].split()[0].split(","))} for log in logs]
    assert of[0] | of[1] <= before
    assert not of[0] & of[1]


def test_cores_of_their_own_are_for_start_ups_and_must_be_enough(fake, monkeypatch):
    with pytest.raises(ValueError, match="--only-starts"):
        CompareSettings(own_cores=True)
    settings = CompareSettings(only_starts=True, own_cores=True)
    monkeypatch.setattr(bench.os, "sched_getaffinity", lambda process: {0})
    with pytest.raises(ValueError, match="4 engines need as many cores, got 1"):
        list(compare(LATENT, settings, lambda line: None))


def test_a_late_answer_is_an_error(fake, tmp_path):
    settings = CompareSettings(answer_s=0.01)
    engine = Engine(LATENT, CUSTOM, tmp_path / "place", settings)
    with pytest.raises(EngineError, match="took longer than 0 s"):
        engine.answer()
    engine.close()


def test_no_round_begins_after_the_limit(fake):
    settings = CompareSettings(rounds=3, limit_s=0.0, answer_s=30.0, profiles=False)
    final = list(compare(LATENT, settings, lambda line: None))[-1]
    assert not any(item.speeds for item in final.rows)


def test_the_command_adds_to_a_file_call_by_call(fake, capsys):
    data, page = fake / "all.json", fake / "page.md"
    known = ["--json", str(data), "--out", str(page), "--rounds", "1", "--only", LATENT.name]
    assert main([*known, "--backends", "CUSTOM"]) == 0
    assert main([*known, "--backends", "FLASH_ATTN_MLA", "--merge", str(data)]) == 0
    found = load_comparisons(data).of(LATENT.name)
    assert [item.contender for item in found.rows] == [FLASH_MLA_3, CUSTOM]
    assert "| prefill: 16 x (4096 in + 1 out), in tok/s | CUSTOM | 43691 |" in page.read_text()
    assert main(["--render", "--merge", str(data)]) == 0
    assert "43691" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--only", "bert"], "model must be one of"),
        (["--rounds", "0"], "rounds must be positive"),
        (["--render", "--merge", "nowhere.json"], "nowhere.json"),
    ],
)
def test_bad_input_is_told(arguments, problem, capsys):
    assert main(arguments) == 2
    assert problem in capsys.readouterr().err


def test_vllms_own_words_are_found():
    text = "INFO Using FLASHMLA attention backend\nDEBUG x\nERROR no `a` | b\nTraceback\n"
    assert vllm_words(text) == "ERROR no 'a' / b"
    assert vllm_words("nothing") == ""


def test_requests_survive_json():
    request = Request(load=LATENT.loads[0], seed=3, profiles=True)
    assert Request.model_validate_json(request.model_dump_json()) == request
    assert json.loads(Contender(backend="X").model_dump_json())["cache"] == "auto"
