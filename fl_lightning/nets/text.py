"""Networks for text."""

from typing import Annotated

import torch
from torch import Tensor, nn

from fl_lightning.core import Checked, Interval, Size
from fl_lightning.nets.vit import EncoderBlock

Vocabulary = Annotated[int, Interval("[1, 1e9]")]


class FastText(Checked, nn.Module, key="model.net"):
    """FedGMT's network for AG News: the mean of all embeddings, including the padding's, and two linear layers.

    There is no activation between the layers. 3,157,508 weights by default.

    Args:
        vocabulary: Number of tokens; token 0 is padding, and its embedding stays zero.
        dim: Width.
        num_classes: Number of classes.
    """

    def __init__(self, vocabulary: Vocabulary = 98_635, dim: Size = 32, num_classes: Size = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.hidden, self.fc = nn.Linear(dim, dim), nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of tokens ``(N, length)``, int64."""
        return self.fc(self.hidden(self.embedding(x).mean(1)))


class TextTransformer(Checked, nn.Module, key="model.net"):
    """A small transformer encoder: the blocks of `ViTCIFAR` over embedded tokens, and a head on their mean.

    Padding takes part as any token. 4,065,540 weights by default; for LoRA its layers are ``q``, ``k``, ``v``, ``out``.

    Args:
        vocabulary: Number of tokens.
        length: Tokens of a sample.
        dim: Width.
        blocks: Number of encoder blocks.
        heads: Attention heads; must divide the width.
        num_classes: Number of classes.
    """

    def __init__(
        self,
        vocabulary: Vocabulary = 30_000,
        length: Size = 200,
        dim: Size = 128,
        blocks: Size = 2,
        heads: Size = 4,
        num_classes: Size = 4,
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.position = nn.Parameter(0.02 * torch.randn(1, length, dim))
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of tokens ``(N, length)``, int64."""
        return self.head(self.blocks(self.embedding(x) + self.position).mean(1))


class LEAFLSTM(Checked, nn.Module, key="model.net"):
    """LEAF's network for Shakespeare: the next character after a text (Caldas et al. 2018). 819,920 weights by default.

    An embedding, LSTM layers, and a linear layer of the last character's output. PyTorch's LSTM has two bias vectors,
    TensorFlow's one.

    Args:
        vocabulary: Number of characters.
        dim: Width of the embedding.
        hidden: Width of an LSTM layer.
        layers: Number of LSTM layers.
        num_classes: Number of classes.
    """

    def __init__(
        self, vocabulary: Size = 80, dim: Size = 8, hidden: Size = 256, layers: Size = 2, num_classes: Size = 80
    ) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim)
        self.lstm = nn.LSTM(dim, hidden, layers, batch_first=True)
        self.fc = nn.Linear(hidden, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of characters ``(N, length)``, int64."""
        return self.fc(self.lstm(self.embedding(x))[0][:, -1])
