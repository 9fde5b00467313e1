"""Nets of Hugging Face, made from configs: what they compute, from files, with adapters, and in rounds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from fl_lightning import (
    SGD,
    FedAvg,
    FederatedTrainer,
    FedSAM,
    FlatnessMonitor,
    FromDataset,
    HuggingFaceNet,
    LambdaMax,
    LoRA,
    UserError,
)  # fmt: skip
from fl_lightning.core import moving_buffers

TEXT: dict[str, Any] = {"vocab_size": 50, "pad_token_id": 0, "num_labels": 3}
NETS = {
    "distilbert": (
        transformers.DistilBertConfig(dim=16, n_layers=2, n_heads=2, hidden_dim=32, max_position_embeddings=8, **TEXT),
        "sequence_classification",
        ["q_lin", "v_lin"],
    ),
    "causal": (
        transformers.LlamaConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, **TEXT
        ),
        "sequence_classification",
        ["q_proj", "v_proj"],
    ),
    "vit": (
        transformers.ViTConfig(
            hidden_size=16, num_hidden_layers=2, num_attention_heads=2, intermediate_size=32, image_size=8,
            patch_size=4, num_channels=1, num_labels=3,
        ),
        "image_classification",
        ["q_proj", "v_proj"],
    ),
}  # fmt: skip


def inputs(task: str) -> torch.Tensor:
    draw = torch.Generator().manual_seed(0)
    return (
        torch.randint(1, 50, (6, 8), generator=draw) if "sequence" in task else torch.rand(6, 1, 8, 8, generator=draw)
    )


def folder(name: str, place: Path, weights: bool = True) -> tuple[str, str, list[str]]:
    """Writes a net of a config, or the config alone, and returns its folder, task and targets."""
    config, task, targets = NETS[name]
    if weights:
        torch.manual_seed(0)
        kind = "AutoModelForSequenceClassification" if "sequence" in task else "AutoModelForImageClassification"
        getattr(transformers, kind).from_config(config).save_pretrained(place)
    else:
        config.save_pretrained(place)
    return str(place), task, targets


@pytest.mark.parametrize("name", NETS)
def test_nets_are_those_of_their_files(name: str, tmp_path: Path) -> None:
    path, task, _ = folder(name, tmp_path)
    config, one, other = NETS[name][0], HuggingFaceNet(path, task).eval(), HuggingFaceNet(path, task).eval()  # type: ignore[arg-type]
    x = inputs(task)
    assert one(x).shape == (6, 3)
    torch.testing.assert_close(one(x), other(x), rtol=0, atol=0)
    torch.testing.assert_close(one({one.net.main_input_name: x}), one(x))
    kind = type(one.net).from_pretrained(path).eval()
    torch.testing.assert_close(one(x), kind(x).logits)
    assert type(one.net.config) is type(config)
    assert moving_buffers(one) == []
    assert HuggingFaceNet(path, task, num_classes=7)(x).shape == (6, 7)  # type: ignore[arg-type]


def test_a_new_head_is_made_quietly(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    path, _, _ = folder("distilbert", tmp_path)
    logging = transformers.utils.logging
    capfd.readouterr()
    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    HuggingFaceNet(path, num_classes=7)
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before
    assert "".join(capfd.readouterr()) == ""


def test_padding_is_not_seen(tmp_path: Path) -> None:
    path, task, _ = folder("distilbert", tmp_path)
    net, x = HuggingFaceNet(path).eval(), inputs(task)
    longer = torch.cat([x[:, :5], torch.zeros(6, 3, dtype=torch.long)], 1)
    torch.testing.assert_close(net(longer), net(x[:, :5]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", NETS)
def test_adapters_train_and_have_curvature(name: str, tmp_path: Path) -> None:
    """A config is enough; LoRA is trained by SAM, the rest is as it was, and lambda_max is of the merged weights."""
    path, task, targets = folder(name, tmp_path / "net", weights=False)
    torch.manual_seed(0)
    head = "net.score" if name == "causal" else "net.classifier"
    lora = LoRA(HuggingFaceNet(path, task, attention="eager"), targets, rank=2, trained=[head])  # type: ignore[arg-type]
    before = {n: p.detach().clone() for n, p in lora.named_parameters()}
    samples = [(x, i % 3) for i, x in enumerate(inputs(task))]
    data = FromDataset(samples, samples, num_clients=2, batch_size=3)
    trainer = FederatedTrainer(
        max_rounds=2, clients_per_round=2, accelerator="cpu", enable_progress_bar=False, loggers=[],
        callbacks=[FlatnessMonitor(2, [LambdaMax(merged=True)])], default_root_dir=str(tmp_path),
    )  # fmt: skip
    run = trainer.fit(FedSAM(lora, rho=0.05, optimizer=SGD(0.5)), data)
    after = dict(run.objective.net.named_parameters())
    moved = {n for n, p in before.items() if not torch.equal(p, after[n])}
    assert moved and all("lora_" in n or n.startswith(f"net.{head}") for n in moved)
    assert run.metrics["flatness/merged_lambda_max"] > 0


def test_all_weights_of_a_net_train(tmp_path: Path) -> None:
    """They need no policy for its constants, which are buffers that no file holds."""
    path, task, _ = folder("distilbert", tmp_path / "net")
    samples = [(x, i % 3) for i, x in enumerate(inputs(task))]
    trainer = FederatedTrainer(
        max_rounds=1, clients_per_round=2, accelerator="cpu", enable_progress_bar=False, loggers=[],
        default_root_dir=str(tmp_path),
    )  # fmt: skip
    run = trainer.fit(FedAvg(HuggingFaceNet(path), optimizer=SGD(0.1)), FromDataset(samples, samples, num_clients=2))
    assert run.objective.flat.d == sum(p.numel() for p in HuggingFaceNet(path).parameters())


def test_wrong_paths_are_one_line(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"model\.net\.path = .*nowhere: .*; give a folder that save_pretrained wrote"):
        HuggingFaceNet(str(tmp_path / "nowhere"))
    path, _, _ = folder("vit", tmp_path / "vit")
    with pytest.raises(UserError, match=r"model\.net\.path = .*vit: "):
        HuggingFaceNet(path, "sequence_classification")
