"""A small CNN and a small vision transformer, trained on scikit-learn's digits to the same weights."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional

TRAINED = 1297
"""Images that are trained on; the other 500 are for accuracy."""


@cache
def digits() -> tuple[Tensor, Tensor]:
    """Images ``[1797, 1, 8, 8]`` in [0, 1], shuffled, and their classes."""
    data = load_digits()
    order = torch.randperm(len(data.target), generator=torch.Generator().manual_seed(0))
    return torch.tensor(data.images, dtype=torch.float32)[order, None] / 16, torch.tensor(data.target)[order]


class SmallCnn(nn.Module):
    """Batch norms, a residual sum, joined branches, both kinds of pooling, a transposed convolution."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True))
        self.conv = nn.Sequential(nn.Conv2d(12, 12, 3, padding=1, bias=False), nn.BatchNorm2d(12))
        self.pool = nn.MaxPool2d(2)
        self.wide = nn.Conv2d(12, 12, 3, padding=1)
        self.narrow = nn.Conv2d(12, 8, 1)
        self.up = nn.ConvTranspose2d(20, 16, 2, stride=2, bias=False)
        self.norm = nn.BatchNorm2d(16)
        self.head = nn.Linear(16 * 16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        x = functional.relu(self.conv(x) + x)
        x = self.pool(x)
        x = torch.cat([self.wide(x).relu(), self.narrow(x).relu()], dim=1)
        x = functional.relu(self.norm(self.up(x)))
        x = functional.avg_pool2d(x, 2)
        return self.head(x.flatten(1))


class Block(nn.Module):
    """A transformer block whose attention is written out."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).reshape(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4).unbind(0)
        scores = torch.matmul(q, k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        mixed = torch.matmul(scores.softmax(dim=-1), v).transpose(1, 2).reshape(batch, tokens, width)
        x = x + self.out(mixed)
        return x + self.down(functional.gelu(self.up(self.norm2(x))))


class SmallVit(nn.Module):
    """Patches of 2 × 2 pixels, learned positions, two blocks."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.patch = nn.Conv2d(1, width, 2, stride=2)
        self.position = nn.Parameter(torch.zeros(1, 16, width))
        self.blocks = nn.Sequential(Block(width, 4), Block(width, 4))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.patch(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.norm(self.blocks(x)).mean(dim=1))


@cache
def trained(make: Callable[[], nn.Module], epochs: int) -> nn.Module:
    """The model after some epochs, in inference mode. It is shared: capture it, and change the graph."""
    images, classes = digits()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = make()
        optimizer = torch.optim.Adam(model.parameters(), lr=4e-3)
        for _ in range(epochs):
            for rows in torch.randperm(TRAINED).split(64):
                optimizer.zero_grad()
                functional.cross_entropy(model(images[rows]), classes[rows]).backward()
                optimizer.step()
    return model.eval()


def accuracy(model: nn.Module) -> float:
    """Return the accuracy of a model on the images that it was not trained on, in percent."""
    images, classes = digits()
    with torch.no_grad():
        predicted = model(images[TRAINED:]).argmax(dim=1)
    return 100 * (predicted == classes[TRAINED:]).float().mean().item()
