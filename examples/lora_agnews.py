"""A small transformer for LoRA on AG News: texts in two halves, and a body that the first half has trained.

    python examples/lora_agnews.py data AG_NEWS.csv
    fl-lightning centralized --config examples/lora_agnews_body.yaml
    python examples/lora_agnews.py body runs/body/version_0/checkpoints/last.ckpt
    fl-lightning fit --config examples/lora_agnews.yaml

``AG_NEWS.csv`` has rows ``class (1 to 4), title, description``: the published ``test.csv``, or any part of the data.
The vocabulary is that of the first half. The last 800 texts are the test set of both halves. Everything is written to
``data/agnews_lora``.
"""

import csv
import sys
from pathlib import Path

from datasets import Dataset
from transformers import BertConfig

from fl_lightning import HuggingFaceNet
from fl_lightning.data.published import basic_english, numbered, vocabulary
from fl_lightning.nets.pretrained import load_pretrained

PLACE = Path("data/agnews_lora")
WORDS, LENGTH, TEST = 8_000, 40, 800


def data(path: str) -> None:
    """Writes tokens and labels of both halves, and the config of the net."""
    with Path(path).open(encoding="utf-8", newline="") as file:
        rows = [(basic_english(f"{title} {text}"), int(label) - 1) for label, title, text in csv.reader(file)]
    half = len(rows) // 2
    known = dict([*vocabulary([tokens for tokens, _ in rows[:half]]).items()][:WORDS])
    parts = {"first_half": rows[:half], "second_half": rows[half:-TEST]}
    for name, part in parts.items():
        for split, samples in (("train", part), ("test", rows[-TEST:])):
            tokens = numbered([tokens for tokens, _ in samples], known, LENGTH).tolist()
            (PLACE / name).mkdir(parents=True, exist_ok=True)
            labels = [label for _, label in samples]
            Dataset.from_dict({"tokens": tokens, "label": labels}).to_parquet(PLACE / name / f"{split}.parquet")
    BertConfig(
        vocab_size=WORDS, hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64,
        max_position_embeddings=LENGTH, num_labels=4, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    ).save_pretrained(PLACE / "untrained")  # fmt: skip


def body(checkpoint: str) -> None:
    """Writes the trained net without its head, which another task gets anew."""
    net = HuggingFaceNet(str(PLACE / "untrained"))
    load_pretrained(net, checkpoint, [])
    net.net.base_model.save_pretrained(PLACE / "body")


if __name__ == "__main__":
    {"data": data, "body": body}[sys.argv[1]](sys.argv[2])
