"""Greedy generation with a model of a local folder, by our attention and by Transformers' own."""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from attn.integrations.transformers import NAME, register

WARM_UP_TOKENS: Final = 2
"""Tokens that are generated before the run that counts: kernels are compiled, or loaded."""


@dataclass(frozen=True)
class Run:
    """One generation."""

    attention: str
    """:data:`NAME`, or the name of Transformers' attention."""
    tokens: list[int]
    """New tokens."""
    first_token_s: float
    """Seconds from the call to the first token."""
    tokens_per_s: float
    """Rate of the tokens after the first; of all where there is one only."""
    logits: list[Any] = field(default_factory=list, repr=False)
    """``[vocabulary]`` fp32 of each new token, host."""


@dataclass(frozen=True)
class Outcome:
    """What a command found."""

    model: str
    backend: str
    device: str
    dtype: str
    prompt_tokens: int
    runs: list[Run]

    @property
    def equal_tokens(self) -> int:
        """Leading tokens that both runs have in common."""
        first, second = (run.tokens for run in self.runs)
        pairs = zip(first, second, strict=False)
        return next(
            (at for at, (ours, other) in enumerate(pairs) if ours != other),
            min(len(first), len(second)),
        )

    @property
    def largest_difference(self) -> float:
        """The largest difference of a logit, over tokens that had the same text before them."""
        steps = min(self.equal_tokens + 1, *(len(run.logits) for run in self.runs))
        return max(
            float((ours - other).abs().max())
            for ours, other in zip(*(run.logits[:steps] for run in self.runs), strict=True)
        )

    def as_json(self) -> dict[str, Any]:
        """The outcome as the report's JSON."""
        runs = [
            {name: value for name, value in asdict(run).items() if name != "logits"}
            for run in self.runs
        ]
        fields = {
            "schema": 1,
            "model": self.model,
            "backend": self.backend,
            "device": self.device,
            "dtype": self.dtype,
            "prompt_tokens": self.prompt_tokens,
            "runs": runs,
        }
        if len(self.runs) == 2:
            fields["equal_tokens"] = self.equal_tokens
            fields["largest_logit_difference"] = self.largest_difference
        return fields


@dataclass(frozen=True)
class Request:
    """What to generate."""

    folder: Path
    """With the model's ``config.json``, its weights and its tokenizer."""
    prompt: str
    max_new_tokens: int
    backend: str | None = None
    """Name of a dense backend; None chooses by the device."""
    compare: str | None = None
    """Attention of Transformers to generate by too; None for none."""


def generate(request: Request, show: Callable[[str], None]) -> Outcome:
    """Load the model and generate, by our attention and by the attention to compare with.

    Args:
        request: what to generate.
        show: takes our attention's text as it comes.

    Returns:
        One or two runs, ours first.

    Raises:
        MissingDependencyError: Transformers is not installed.
        ValueError: Transformers cannot load the folder, or the backend does not serve the model.
    """
    import torch

    with _quiet():
        register(request.backend)
        from attn.integrations.transformers.attention import backend_on

        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        model, tokenizer = _load(request.folder, device)
        inputs = tokenizer(request.prompt, return_tensors="pt").to(device)
        inputs.pop("token_type_ids", None)
        if not inputs["input_ids"].shape[1]:
            raise ValueError(f"--prompt {request.prompt!r} has no token in this tokenizer")
        keeps = request.compare is not None
        runs = []
        for name in filter(None, (NAME, request.compare)):
            model.set_attn_implementation(name)
            # The first calls compile kernels, or load them.
            _run(model, tokenizer, inputs, name, WARM_UP_TOKENS)
            shown = show if name == NAME else None
            runs.append(_run(model, tokenizer, inputs, name, request.max_new_tokens, shown, keeps))
        return Outcome(
            model=request.folder.resolve().name,
            backend=backend_on(device),
            device=torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU",
            dtype=str(model.dtype).removeprefix("torch."),
            prompt_tokens=inputs["input_ids"].shape[1],
            runs=runs,
        )


def _load(folder: Path, device: Any) -> tuple[Any, Any]:
    """The model, in the type of its weights, and its tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        model = AutoModelForCausalLM.from_pretrained(
            folder, local_files_only=True, dtype="auto", attn_implementation=NAME
        )
    except NotImplementedError:
        raise
    except Exception as error:
        # Transformers raises many kinds of errors here, of several lines.
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ValueError(f"--hf: Transformers cannot load {str(folder)!r}: {reason}") from error
    return model.to(device).eval(), tokenizer


def _run(
    model: Any,
    tokenizer: Any,
    inputs: Any,
    name: str,
    max_new_tokens: int,
    show: Callable[[str], None] | None = None,
    keeps_logits: bool = False,
) -> Run:
    """Generate greedily, one text."""
    streamer = _streamer(tokenizer, show or (lambda text: None))
    begin = time.perf_counter()
    output = model.generate(
        **inputs,
        max_new_tokens=max_new_tokens,
        do_sample=False,
        streamer=streamer,
        return_dict_in_generate=True,
        output_logits=keeps_logits,
        pad_token_id=tokenizer.pad_token_id or model.generation_config.eos_token_id or 0,
    )
    times = streamer.times
    first, last = times[0] - begin, times[-1] - times[0]
    logits = [one[0].float().cpu() for one in output.logits] if keeps_logits else []
    new = output.sequences[0, inputs["input_ids"].shape[1] :].tolist()
    rate = (len(times) - 1) / last if len(times) > 1 else 1 / first
    return Run(name, new, first, rate, logits)


def _streamer(tokenizer: Any, show: Callable[[str], None]) -> Any:
    """A streamer of Transformers that shows words and notes when each token came."""
    from transformers import TextStreamer

    class Timed(TextStreamer):  # type: ignore[misc]
        """Notes the time of each new token."""

        def __init__(self) -> None:
            super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
            self.times: list[float] = []
            self._has_prompt = False

        def put(self, value: Any) -> None:
            """Take the prompt, then one token at a time."""
            if self._has_prompt:
                self.times.append(time.perf_counter())
            self._has_prompt = True
            super().put(value)

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            """Show words that are complete."""
            show(text)

    return Timed()


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep Transformers' own progress and advice off the terminal."""
    logger = logging.getLogger("transformers")
    level = logger.level
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            from transformers.utils import logging as transformers_logging

            transformers_logging.disable_progress_bar()
            transformers_logging.set_verbosity_error()
        except ImportError:
            # Loading the model says what is missing.
            pass
        try:
            yield
        finally:
            logger.setLevel(level)
