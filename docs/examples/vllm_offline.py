"""Generate text with vLLM, every dense layer on this library. Needs a GPU, and vLLM 0.26 to 0.33.

    pip install vllm attn-backends
    python docs/examples/vllm_offline.py [MODEL]

vLLM finds the library by its plugin entry point; ``attention_backend="CUSTOM"`` asks for it.
"""

import sys

from vllm import LLM, SamplingParams

MODEL = "Qwen/Qwen3-8B"
ENGINE = {"attention_backend": "CUSTOM", "max_model_len": 8192}
SAMPLING = {"temperature": 0.0, "max_tokens": 64}
PROMPTS = ["A paged KV cache is", "Attention costs time because"]


def main() -> None:
    """Print each prompt with what the model adds to it."""
    llm = LLM(model=sys.argv[1] if len(sys.argv) > 1 else MODEL, **ENGINE)
    for answer in llm.generate(PROMPTS, SamplingParams(**SAMPLING)):
        print(f"{answer.prompt!r} -> {answer.outputs[0].text!r}")


if __name__ == "__main__":
    main()
