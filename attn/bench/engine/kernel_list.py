"""List the GPU kernels of vLLM's engine on a DeepSeek-V3.2-like model with our backend:
``python -m attn.bench.engine.kernel_list``.

The list shows that no kernel of vLLM's own attention or indexer runs. It is kept as a page, with
the command and the steps that it is of.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Final

from attn.bench.command import USER_ERRORS, Parser, check_writable, usage_error
from attn.bench.engine.compare import CompareSettings, Engine, EngineError
from attn.bench.engine.compare_worker import Request
from attn.bench.engine.engine import EngineEnvironment, Log
from attn.bench.engine.parts import KernelTime, part_of
from attn.bench.engine.rows import markdown_table, named
from attn.bench.engine.shapes import CUSTOM, CUSTOM_ROWS, MODELS, Contender, Load
from attn.bench.engine.vllm import require_engine
from specs.base import Spec

COMMAND: Final = "python -m attn.bench.engine.kernel_list"
MODEL: Final = MODELS["deepseek-v32-16"]
LOADS: Final = (
    # Shorter than a list: vLLM may take another road for them.
    Load(name="short prompts", num_prompts=8, prompt_len=600, output_len=1),
    Load(name="long prompts", num_prompts=2, prompt_len=12288, output_len=1),
    Load(name="decode", num_prompts=16, prompt_len=8193, output_len=16, is_cached=True),
    Load(name="short and long prompts that decode", num_prompts=8, prompt_len=2100, output_len=8),
)
FORBIDDEN: Final = (
    "flash",
    "deep_gemm",
    "deepgemm",
    "mqa_logits",
    "persistent_topk",
    "cooperative_topk",
    "top_k_per_row",
    "topkperrow",
    "cp_gather_indexer",
)
"""Parts of the names of kernels that serve such a model in vLLM, compared without case. ``flash``
is in the name of every kernel of FlashAttention, FlashMLA and FlashInfer; ``mqa_logits`` is what
DeepGEMM calls its kernels, and ``topKPerRow`` what vLLM calls those of ``top_k_per_row``."""


def forbidden_in(names: Iterable[str]) -> list[str]:
    """The names that hold a forbidden part."""
    return [name for name in names if any(part in name.lower() for part in FORBIDDEN)]


class KernelPage(Spec):
    """The kernels of some loads, by cache and load."""

    environment: EngineEnvironment = EngineEnvironment()
    sections: tuple[tuple[Contender, Load, tuple[KernelTime, ...]], ...] = ()
    failures: tuple[tuple[Contender, str], ...] = ()
    """Engines that failed, and their last errors."""

    @property
    def names(self) -> tuple[str, ...]:
        """All kernels' names."""
        return tuple(
            dict.fromkeys(kernel.name for *_, kernels in self.sections for kernel in kernels)
        )


def render(page: KernelPage) -> str:
    """The page in markdown."""
    environment, found = page.environment, forbidden_in(page.names)
    parts = [
        f"# Kernels of vLLM {environment.vllm} with our sparse backend on {environment.device}",
        f"{environment.date}, commit {environment.commit}; torch {environment.torch}, triton "
        f"{environment.triton}. Command: `{COMMAND} --out FILE`.",
        f"{MODEL.title}, {MODEL.config['num_hidden_layers']} layers, random weights, vLLM's "
        "default compilation and CUDA graphs. Each section is one `LLM.generate` under "
        "`torch.profiler`, after one to warm up, and lists all that ran on the GPU: kernels, "
        "copies and fills.",
        "Names that hold one of "
        + ", ".join(f"`{part}`" for part in FORBIDDEN)
        + " (in any case): "
        + (", ".join(map(named, found)) if found else "none")
        + ".",
    ]
    for contender, load, kernels in page.sections:
        parts.append(f"## {contender.label}, {load.name}")
        parts.append(load.what.rsplit(",", 1)[0] + ".")
        rows = [
            [part_of(item.name).value, named(item.name), str(item.count), f"{item.us / 1000:.3f}"]
            for item in kernels
        ]
        parts.append(markdown_table(["part", "kernel", "launches", "ms"], rows))
    for contender, error in page.failures:
        parts.append(f"{contender.label} failed: `{error[:400].replace('`', chr(39))}`")
    return "\n\n".join(parts) + "\n"


def listed(settings: CompareSettings, log: Log) -> Iterator[KernelPage]:
    """Start our engines, one for each cache, and record the kernels of each load.

    All engines start at once. Gives the page so far after each engine; one that fails keeps what
    was recorded of it and of the others.
    """
    page = KernelPage()
    with tempfile.TemporaryDirectory() as folder, ExitStack() as opened:
        engines = []
        for contender in (CUSTOM, CUSTOM_ROWS):
            engine = Engine(MODEL, contender, Path(folder) / contender.cache, settings)
            opened.callback(engine.close)
            engines.append(engine)
        for engine in engines:
            contender = engine.contender
            try:
                started = engine.answer()
                page = page.replace(environment=started.environment or page.environment)
                log(f"{contender.label}: started in {started.start_up_s:.1f} s")
                for load in LOADS:
                    engine.ask(Request(load=load))
                    kernels = engine.ask(Request(load=load, seed=1, profiles=True)).kernels
                    log(f"{contender.label}, {load.name}: {len(kernels)} kernels")
                    page = page.replace(sections=(*page.sections, (contender, load, kernels)))
            except EngineError as error:
                log(f"{contender.label}: {error}\n{engine.output()[-6000:]}")
                page = page.replace(failures=(*page.failures, (contender, str(error))))
            engine.close()
            yield page


def _parser() -> argparse.ArgumentParser:
    parser = Parser(COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, help="Markdown file to write; default: print it.")
    parser.add_argument("--logs", type=Path, help="Folder that keeps the engines' output.")
    parser.add_argument("--commit", help="Commit that is listed; default: $ATTN_COMMIT, then git.")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit code is 1 when a forbidden kernel ran or an engine failed."""
    options = _parser().parse_args(arguments)

    def log(line: str) -> None:
        print(line, flush=True)

    page = KernelPage()
    try:
        check_writable("--out", options.out)
        require_engine()
        if options.logs is not None:
            options.logs.mkdir(parents=True, exist_ok=True)
        for page in listed(CompareSettings(commit=options.commit, logs=options.logs), log):
            if options.out is not None:
                options.out.write_text(render(page), encoding="utf-8")
    except USER_ERRORS as error:
        return usage_error(error)
    if options.out is None:
        log(render(page))
    found = forbidden_in(page.names)
    log(f"forbidden: {', '.join(found) or 'none'}")
    return int(bool(found or page.failures))


if __name__ == "__main__":
    sys.exit(main())
