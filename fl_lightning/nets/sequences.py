"""Networks of sequences: of tokens, of characters, and of the patches of an image."""

from typing import Annotated

import torch
from torch import Tensor, nn

from fl_lightning.core import Checked, Interval, Size, require


class _Encoder(Checked, nn.Module, key="model.net"):
    """An embedding with positions, blocks of width ``dim``, and a head on the normalized mean over the tokens."""

    def __init__(self, embedding: nn.Module, position: Tensor, blocks: int, heads: int, num_classes: int) -> None:
        super().__init__()
        dim = position.shape[-1]
        self.embedding, self.position = embedding, nn.Parameter(position)
        self.blocks = nn.Sequential(*(EncoderBlock(dim, heads) for _ in range(blocks)))
        self.head = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, num_classes))

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of tokens ``(N, length)``, int64."""
        return self.head(self.blocks(self.embedding(x) + self.position).mean(1))


class ViTCIFAR(_Encoder):
    """FedGMT's vision transformer (ViT-CIFAR): 64 patches of 4x4 pixels, no class token, no dropout.

    Two blocks of width 384; scores are divided by the root of the whole width, not of a head's; a GELU after both
    layers of an MLP; the head takes the normalized mean over the patches. 1,825,162 weights with 10 classes.

    Args:
        num_classes: Number of classes.
        dim: Width.
        blocks: Number of encoder blocks.
        heads: Attention heads; must divide the width.
    """

    def __init__(self, num_classes: Size = 10, dim: Size = 384, blocks: Size = 2, heads: Size = 8) -> None:
        super().__init__(nn.Linear(48, dim), torch.randn(1, 64, dim), blocks, heads, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of images ``(N, 3, 32, 32)``."""
        patches = x.reshape(len(x), 3, 8, 4, 8, 4).permute(0, 2, 4, 3, 5, 1).reshape(len(x), 64, 48)
        return super().forward(patches)


class EncoderBlock(nn.Module):
    """``x + attention(norm(x))``, then ``x + mlp(norm(x))``; scores are divided by the root of the whole width.

    Args:
        dim: Width.
        heads: Attention heads; must divide the width.

    Raises:
        UserError: If heads does not divide the width.
    """

    def __init__(self, dim: Size, heads: Size) -> None:
        super().__init__()
        require(dim % heads == 0, "model.net.heads", heads, f"does not divide the width, dim = {dim}; use a divisor")
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(dim, dim), nn.GELU(), nn.Linear(dim, dim), nn.GELU())

    def forward(self, x: Tensor) -> Tensor:
        """Returns tokens ``(N, tokens, dim)`` of the same shape."""
        x = x + self.attention(self.norm1(x))
        return torch.add(x, self.mlp(self.norm2(x)))

    def attention(self, x: Tensor) -> Tensor:
        """Returns the attention's output; it is written out, since the fused kernels have no second derivative."""
        n, tokens, dim = x.shape
        q, k, v = (layer(x).view(n, tokens, self.heads, -1).transpose(1, 2) for layer in (self.q, self.k, self.v))
        scores = q @ k.transpose(2, 3) * dim**-0.5
        return self.out((scores.softmax(-1) @ v).transpose(1, 2).flatten(2))


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


class TextTransformer(_Encoder):
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
        super().__init__(nn.Embedding(vocabulary, dim), 0.02 * torch.randn(1, length, dim), blocks, heads, num_classes)


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
