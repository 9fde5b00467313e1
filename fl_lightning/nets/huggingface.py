"""Nets of Hugging Face's ``transformers``."""

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

from torch import Tensor, nn

from fl_lightning.core import Checked, Size, UserError, folded, imported

KINDS = {
    "sequence_classification": "AutoModelForSequenceClassification",
    "image_classification": "AutoModelForImageClassification",
}
"""Tasks, and the classes of transformers that make their nets."""


class HuggingFaceNet(Checked, nn.Module, key="model.net"):
    """A net of Hugging Face's ``transformers`` that classifies texts or images, from local files.

    A text is a row of tokens; those that equal ``pad_token_id`` of the config are padding, which the net does not see.
    A sample may also be several tensors by the names of the net's arguments, such as ``input_ids`` and
    ``attention_mask``. Nothing is downloaded. Needs transformers.

    Args:
        path: A folder that ``save_pretrained`` wrote, or the name of a net in the local cache. A folder with
            ``config.json`` alone gives a net with initial weights.
        task: What the net does, and so which head it has.
        num_classes: Number of classes; null: that of the config. A head of another shape than in the files has initial
            weights.
        attention: How attention is computed, such as ``eager`` or ``sdpa``; null: as transformers chooses.

    Raises:
        UserError: If there is no transformers, or no net for this task that its files describe.
    """

    def __init__(
        self,
        path: str,
        task: Literal["sequence_classification", "image_classification"] = "sequence_classification",
        num_classes: Size | None = None,
        attention: str | None = None,
    ) -> None:
        super().__init__()
        needs = "model.net = HuggingFaceNet: needs transformers; pip install 'fl-lightning[adapters]'"
        transformers = imported("transformers", needs)
        kind = getattr(transformers, KINDS[task])
        classes = {} if num_classes is None else {"num_labels": num_classes}
        attentions = {} if attention is None else {"attn_implementation": attention}
        try:
            config = transformers.AutoConfig.from_pretrained(path, local_files_only=True, **classes)
            if _without_weights(Path(path)):
                self.net = kind.from_config(config, **attentions)
            else:
                self.net = kind.from_pretrained(
                    path, config=config, local_files_only=True, ignore_mismatched_sizes=True, **attentions
                )
        except (OSError, ValueError, ImportError, KeyError) as error:
            remedy = "give a folder that save_pretrained wrote, or the name of a net in the local cache"
            raise UserError(f"model.net.path = {path}: {folded(error):.150}; {remedy}") from None
        self.net.float()
        self._text = task == "sequence_classification"

    def forward(self, x: Tensor | Mapping[str, Tensor]) -> Tensor:
        """Returns logits ``(N, classes)`` of tokens ``(N, length)``, images ``(N, C, H, W)``, or tensors by name."""
        if isinstance(x, Mapping):
            given = dict(x)
        elif self._text:
            padding = self.net.config.pad_token_id
            given = {"input_ids": x} | ({} if padding is None else {"attention_mask": (x != padding).long()})
        else:
            given = {"pixel_values": x}
        logits: Tensor = self.net(**given).logits
        return logits


def _without_weights(path: Path) -> bool:
    """Returns whether a folder has a config, but no weights."""
    return path.is_dir() and not any(file.name.startswith(("model", "pytorch_model")) for file in path.iterdir())
