"""Networks for text."""

from torch import Tensor, nn


class FastText(nn.Module):
    """FedGMT's network for AG News: the mean of all embeddings, including the padding's, and two linear layers.

    There is no activation between the layers. 3,157,508 weights by default.

    Args:
        vocabulary: Number of tokens; token 0 is padding, and its embedding stays zero.
        dim: Width.
        num_classes: Number of classes.
    """

    def __init__(self, vocabulary: int = 98_635, dim: int = 32, num_classes: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, dim, padding_idx=0)
        self.hidden = nn.Linear(dim, dim)
        self.fc = nn.Linear(dim, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Returns logits ``(N, num_classes)`` of tokens ``(N, length)``, int64."""
        logits: Tensor = self.fc(self.hidden(self.embedding(x).mean(1)))
        return logits
