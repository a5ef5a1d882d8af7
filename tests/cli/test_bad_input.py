"""Every option of every command with a wrong value: one line that names it, exit code 2."""

from collections.abc import Iterator
from typing import Any

import pytest
import typer
from typer.testing import CliRunner

from attn.cli.app import app
from specs.engine import Kernels

TOO_SMALL = "Input should be greater than or equal to"
# Option of ``attn run`` -> a kernel that it accepts.
KERNEL_OPTIONS = {
    f"--{family}-{field.replace('_', '-')}-kernel": next(iter(info.annotation)).value
    for family, record in Kernels.model_fields.items()
    for field, info in record.annotation.model_fields.items()
}
# Command -> option -> a wrong value, and words of the error line.
WRONG: dict[str, dict[str, tuple[str, list[str]]]] = {
    "run": {
        "--model": ("llama-4-1b", ["llama-4-1b", "did you mean 'llama-3.2-1b'", "qwen3-8b"]),
        "--trace": ("nowhere.csv", ["nowhere.csv"]),
        "--backend": ("FASTEST", ["'FASTEST'", "TORCH_REF"]),
        "--kv-cache-dtype": ("nvfp4", ["kv-cache-dtype", "'nvfp4'", "fp8_e5m2"]),
        "--block-size": ("0", ["--block-size", TOO_SMALL]),
        "--layers": ("many", ["--layers", "integer"]),
        "--requests": ("0", ["--requests", TOO_SMALL]),
        "--tp": ("3", ["tensor_parallel_size", "num_heads (32)", "got 3"]),
        "--max-num-seqs": ("0", ["--max-num-seqs", TOO_SMALL]),
        "--max-num-batched-tokens": ("-5", ["--max-num-batched-tokens", TOO_SMALL]),
        "--kv-memory": ("-1", ["size", "512MiB", "'-1'"]),
        "--check-rows": ("-1", ["--check-rows", TOO_SMALL]),
        **{
            option: ("cutlass", [option, "'cutlass'", f"'{served}'"])
            for option, served in KERNEL_OPTIONS.items()
        },
        "--kv-layout": ("rows", ["kv-layout", "'rows'", "fp8_nope_fp8_rope"]),
        "--speculative": ("-1", ["--speculative", TOO_SMALL]),
        "--seed": ("-1", ["--seed", TOO_SMALL]),
        "--threads": ("0", ["--threads", TOO_SMALL]),
        "--report": ("/dev/null/x", ["--report", "/dev/null/x"]),
        "--html": ("/", ["--html", "'/'"]),
        "--compare": ("nowhere.json", ["nowhere.json"]),
        "--corrupt": ("everything", ["--corrupt", "'everything'", "zeros"]),
    },
    "generate": {
        "--hf": ("nowhere", ["--hf", "config.json", "'nowhere'"]),
        "--prompt": ("", ["--prompt", "''"]),
        "--max-new-tokens": ("0", ["--max-new-tokens", TOO_SMALL]),
        "--backend": ("FASTEST", ["'FASTEST'", "TORCH_REF"]),
        "--threads": ("0", ["--threads", TOO_SMALL]),
        "--compare": ("flash", ["--compare", "'flash'", "'eager'"]),
        "--report": ("/dev/null/x", ["--report", "/dev/null/x"]),
    },
    "explain": {
        "--model": ("qwen3-9b", ["qwen3-9b", "did you mean 'qwen3-8b'"]),
        "--device": ("h300", ["unknown device 'h300'", "did you mean", "mi300x"]),
        "--backend": ("TRITON", ["'TRITON'", "did you mean", "TORCH_REF"]),
        "--kv-cache-dtype": ("fp9", ["kv-cache-dtype", "'fp9'", "did you mean 'fp8'"]),
        "--block-size": ("-16", ["--block-size", TOO_SMALL]),
    },
    "warm": {
        "--model": ("qwen3-9b", ["qwen3-9b", "did you mean 'qwen3-8b'"]),
        "--device": ("h300", ["unknown device 'h300'", "did you mean", "mi300x"]),
        "--kv-cache-dtype": ("fp9", ["kv-cache-dtype", "'fp9'", "did you mean 'fp8'"]),
        "--block-size": ("0", ["--block-size", TOO_SMALL]),
        "--tp": ("3", ["tensor_parallel_size", "num_heads (32)", "got 3"]),
        "--max-model-len": ("0", ["--max-model-len", TOO_SMALL]),
        "--max-num-seqs": ("0", ["--max-num-seqs", TOO_SMALL]),
        "--max-num-batched-tokens": ("0", ["--max-num-batched-tokens", TOO_SMALL]),
        "--speculative": ("-1", ["--speculative", TOO_SMALL]),
        "--jobs": ("0", ["--jobs", TOO_SMALL]),
    },
    "doctor": {
        "--model": ("qwen3-9b", ["qwen3-9b", "did you mean 'qwen3-8b'"]),
        "--device": ("h300", ["unknown device 'h300'", "did you mean", "mi300x"]),
    },
    "bench build": {
        "--num-reqs": ("0", ["--num-reqs", TOO_SMALL]),
        "--repeats": ("0", ["--repeats", TOO_SMALL]),
    },
    "bench kernels": {
        "--backend": ("TRITON_ATT", ["did you mean 'TRITON_ATTN'"]),
        "--table": ("blackwell", ["table", "'blackwell'", "hopper"]),
        **{
            f"--{family}-decode-kernel": (
                "fast",
                [f"{family.replace('-', '_')}_decode_kernel", "'fast'", "hopper"],
            )
            for family in ("dense", "latent", "sparse-own")
        },
        "--case": ("dec_b9", ["case", "'dec_b9'", "dec_b1_8k"]),
        "--peer": ("fa9", ["peer", "'fa9'", "fa3"]),
        "--rounds": ("0", ["--rounds", TOO_SMALL]),
        "--reps": ("few", ["--reps", "integer"]),
        "--out": ("/no/such/folder/table.md", ["--out", "/no/such/folder/table.md"]),
        "--json": ("/", ["--json", "'/'"]),
        "--html": ("/no/such/folder/x.html", ["--html", "/no/such/folder/x.html"]),
        "--compare": ("nowhere.json", ["nowhere.json"]),
        "--merge": ("nowhere.json", ["nowhere.json"]),
    },
    "backends": {},
    "new-backend": {
        "name": ("9lives", ["name must be letters", "'9lives'"]),
        "--dir": ("/dev/null/x", ["/dev/null/x"]),
        "--family": ("sparse", ["--family", "'sparse'", "'latent'"]),
    },
}
# Words that a command needs before any option.
NEEDED = {
    "new-backend": ["OUTER_ATTN"],
    "generate": ["--hf", "nowhere", "--prompt", "x"],
    "warm": ["--model", "llama-3.1-8b"],
}
# The description of a measurement may be any text.
ANY_TEXT = {("bench kernels", "--commit")}


def commands() -> Iterator[tuple[str, Any]]:
    """Every command by its words on the command line."""
    for name, command in typer.main.get_command(app).commands.items():  # type: ignore[attr-defined]
        if hasattr(command, "commands"):
            for sub, one in command.commands.items():
                yield f"{name} {sub}", one
        else:
            yield name, command


def invoke(*arguments: str) -> Any:
    return CliRunner().invoke(app, list(arguments))


def the_line(result: Any) -> str:
    """The message of a command that ends with 2; it is one line, and the only output."""
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stderr.endswith("\n")
    return str(result.stderr)


def test_every_option_that_takes_a_value_is_walked() -> None:
    found = {
        (name, option.opts[0])
        for name, command in commands()
        for option in command.params
        if not getattr(option, "is_flag", False)
    }
    walked = {(name, option) for name, options in WRONG.items() for option in options}
    assert walked | ANY_TEXT == found
    assert {name for name, _ in commands()} == set(WRONG)


@pytest.mark.parametrize(
    ("command", "option"), [(name, option) for name in WRONG for option in WRONG[name]]
)
def test_a_wrong_value_is_one_line_that_names_it(command: str, option: str) -> None:
    value, words = WRONG[command][option]
    is_option = option.startswith("-")
    given = [*NEEDED.get(command, []), option, value] if is_option else [value]
    line = the_line(invoke(*command.split(), *given))
    assert all(word in line for word in words), line


@pytest.mark.parametrize("command", WRONG)
def test_an_unknown_option_or_argument_is_one_line(command: str) -> None:
    words = [*command.split(), *NEEDED.get(command, [])]
    assert "--no-such" in the_line(invoke(*words, "--no-such", "1"))
    assert "nonsense" in the_line(invoke(*words, "nonsense"))


@pytest.mark.parametrize("words", [["frob"], ["bench", "frob"]])
def test_an_unknown_command_is_one_line(words: list[str]) -> None:
    assert "'frob'" in the_line(invoke(*words))


@pytest.mark.parametrize("words", [[], ["bench"]])
def test_no_command_prints_the_help(words: list[str]) -> None:
    result = invoke(*words)
    assert result.exit_code == 2
    assert "Usage: " in result.stdout
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["run", "--latent-rows-kernel", "triton"],
            ["latent-rows-kernel triton", "llama-3.2-1b has none"],
        ),
        (
            ["run", "--sparse-prefill-kernel", "trtllm"],
            ["sparse-prefill-kernel trtllm", "sparse latent"],
        ),
        (["run", "--kv-layout", "bf16"], ["kv-layout", "latent layers"]),
        (["run", "--trace", "x.csv", "--synthetic"], ["--trace or --synthetic, not both"]),
        (["run", "--corrupt", "zeros", "--check-rows", "0"], ["--check-rows above 0"]),
        (["run", "--kv-memory", "12kB"], ["KV budget", "smaller than one request"]),
        (["bench", "kernels", "--render"], ["merge must name results"]),
        (["bench", "kernels", "--peer", "fa3", "--no-peers"], ["not both"]),
    ],
)
def test_options_that_do_not_go_together_are_one_line(
    arguments: list[str], words: list[str]
) -> None:
    line = the_line(invoke(*arguments))
    assert all(word in line for word in words), line


def test_the_backend_of_a_named_kernel_is_told_in_any_case() -> None:
    sparse = [
        "run",
        "--model",
        "deepseek-v3.2",
        "--sparse-prefill-kernel",
        "triton_sparse",
        "--backend",
    ]
    assert "unknown attention backend 'FOO'" in the_line(invoke(*sparse, "FOO"))
    assert "is a kernel of SPARSE_MLA, got torch_ref" in the_line(invoke(*sparse, "torch_ref"))


@pytest.mark.parametrize("command", ["run", "explain"])
def test_only_cache_dtypes_that_a_backend_serves_are_offered(command: str) -> None:
    (option,) = [
        option
        for name, one in commands()
        if name == command
        for option in one.params
        if option.opts[0] == "--kv-cache-dtype"
    ]
    assert option.help == (
        "One of auto, float16, bfloat16, fp8, fp8_e4m3, fp8_e5m2, fp8_ds_mla, "
        "int4_per_token_head, int8_per_token_head, fp8_per_token_head."
    )
    for name in ("fp8_inc", "nvfp4", "turboquant_k8v4", "octave_k3v4", "nvfp4_ds_mla"):
        assert f"got {name!r}" in the_line(invoke(command, "--kv-cache-dtype", name))
