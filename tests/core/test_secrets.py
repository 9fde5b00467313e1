"""What looks like a secret is hidden, and nothing else."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from fl_lightning.core.secrets import hidden, hidden_text, hidden_words

LOGGER = "{class_path: mine.Logger, init_args: {api_key: S3cret}}"


@pytest.mark.parametrize(
    "words",
    [
        ["--trainer.loggers", LOGGER],
        [f"--trainer.loggers={LOGGER}"],
        ["--trainer.loggers=- class_path: mine.Logger\n  init_args:\n    api_key: S3cret\n"],
        ["--trainer.loggers", "{'class_path': 'mine.Logger', 'init_args': {'api_key': 'S3cret'}}"],
        ["--trainer.loggers.api_key=S3cret"],
        ["--trainer.loggers.api_key", "S3cret"],
        ["--token", "-S3cret"],
        ["--x.apiKey=S3cret"],
        ["--x.auth=S3cret"],
        ["--x.cookie=S3cret"],
        ["--x.headers={Cookie: S3cret}"],
        ["--x.webhook_url", "https://example.org/S3cret"],
        ["--x.path", "https://a.blob.core.windows.net/b?sv=2024&sig=S3cret"],
        ["--x.path=https://b.s3.amazonaws.com/c?X-Amz-Signature=S3cret"],
        ["--x.url=https://hooks.slack.com/services/T0/B0/S3cret"],
        ["--x.url", "https://discord.com/api/webhooks/1/S3cret"],
        ["--x.passwd", "S3cret"],
        ["--x.wandb_key=S3cret"],
        ["--x.pin=S3cret"],
        ["--x.pin_code", "S3cret"],
        ["--x.license=S3cret"],
        ["--x.opts={licence_key: S3cret, otp: S3cret}"],
        ["--x.opts={key: S3cret}"],
        ["--x.opts=[[api_key, S3cret]]"],
        ["--x.opts=[--token, S3cret]"],
        ["--x.credentials.user=S3cret"],
        ["--x", "password: correct horse S3cret"],
        ["--x", "Authorization: Bearer S3cret"],
        ["--data.path=https://user:S3cret@host/a"],
        ["--data.path", "https://S3cret@host/a"],
        ["--data.path", "postgres://user:S3cret@host/a"],
        ["--data.path=https://host/a?token=S3cret&b=1"],
        ["hf_S3cretaaaaaaaaaaaa"],
        ["--x=S3cret0123456789abcdef"],
    ],
)
def test_no_form_of_a_command_line_keeps_a_secret(words: list[str]) -> None:
    shown = hidden_words(["--model.net.class_token=true", *words, "--after=1"])
    assert "S3cret" not in " ".join(shown) and shown[-1] == "--after=1" and len(shown) == len(words) + 2


def test_other_words_stay() -> None:
    words = [
        "--config", "quickstart", "--monkey=1", "--x.pin_memory=true", "--x.spin=0.5", "--x.license_file=a.txt",
        "--trainer.name=author-keys-2024", "--data.label_key=label",
        "--model.net.pad_token=[PAD]", "--ckpt_path", "runs/a/version_0/checkpoints/last.ckpt", "--model.lr=0.1",
        "--data.partition={class_path: Dirichlet, init_args: {alpha: 0.1}}", "--data.path=hf://datasets/a@main",
        "sweep.yaml", "--trainer.callbacks+=mine.Tokens", "--data.path=http://localhost:8080/x",
    ]  # fmt: skip
    assert hidden_words(words) == words


def test_configs() -> None:
    config: dict[str, Any] = {
        "api_key": "a", "token": 5, "path": "s3://u:p@h/x", "none": None, "auth": {"class_path": "A", "user": "u"},
        "secret": True, "key": None, "list": [{"password": "p", "n": 1}],
    }  # fmt: skip
    assert hidden(config) == {
        "api_key": "***", "token": "***", "path": "s3://u:***@h/x", "none": None,
        "auth": {"class_path": "A", "user": "***"}, "secret": True, "key": None, "list": [{"password": "***", "n": 1}],
    }  # fmt: skip
    assert hidden(hidden(config)) == hidden(config)
    assert hidden({"sig": 0.5, "pin": 1234}) == {"sig": 0.5, "pin": "***"}  # no fraction is a secret
    for path in Path("configs").rglob("*.yaml"):
        content = yaml.safe_load(path.read_text())
        assert hidden(content) == content


def test_source_code() -> None:
    code = "+token = next(it)\n sorted(rows, key=len)\n-def f(password: str = None):\n x = a.key\n"
    assert hidden_text(code) == code
    secret = '+login(key="S3cret")\n+export WANDB_API_KEY=S3cret\n "api_key": \'S3cret\'\n-u = "https://u:S3cret@h"\n'
    shown = hidden_text(secret)
    assert "S3cret" not in shown and shown.count("***") == shown.count("\n") == 4
