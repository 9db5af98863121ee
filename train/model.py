"""A small GPT over bytes: no tokenizer, 256 words, everything in one file.

Shapes: B micro-batch, T context, C channels, H heads, V = 256 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY = 256


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The shape of a model."""

    layers: int
    channels: int
    heads: int
    context: int
    dropout: float


SIZES = {
    "tiny": Size(layers=2, channels=64, heads=4, context=64, dropout=0.05),
    "demo": Size(layers=4, channels=160, heads=5, context=80, dropout=0.05),
    "default": Size(layers=6, channels=384, heads=6, context=128, dropout=0.1),
}


def turns(places: int, width: int, device: torch.device) -> Tensor:
    """Return, for each place and pair of channels, the angle by which it is turned: [T, width/2].

    Two places then see each other by their distance alone (rotary position embedding).
    """
    speed = 10_000.0 ** (-torch.arange(0, width, 2, device=device) / width)
    return torch.outer(torch.arange(places, device=device), speed)


def turn(x_BHTc: Tensor, angle_Tc: Tensor) -> Tensor:
    """Turn each pair of channels by the angle of its place."""
    a, b = x_BHTc.chunk(2, dim=-1)
    cos, sin = angle_Tc.cos(), angle_Tc.sin()
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


class Attention(nn.Module):
    """Each place looks at itself and at all places before it."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads = size.heads
        self.query_key_value = nn.Linear(size.channels, 3 * size.channels, bias=False)
        self.out = nn.Linear(size.channels, size.channels, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix along T."""
        B, T, C = x_BTC.shape
        q, k, v = (
            part.view(B, T, self.heads, C // self.heads).transpose(1, 2)
            for part in self.query_key_value(x_BTC).chunk(3, dim=-1)
        )
        angle_Tc = turns(T, C // self.heads, x_BTC.device)
        y_BHTc = F.scaled_dot_product_attention(
            turn(q, angle_Tc), turn(k, angle_Tc), v, is_causal=True
        )
        y_BTC: Tensor = self.out(y_BHTc.transpose(1, 2).reshape(B, T, C))
        return y_BTC


class Network(nn.Module):
    """Each place is worked on alone."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.widen = nn.Linear(size.channels, 4 * size.channels, bias=False)
        self.out = nn.Linear(4 * size.channels, size.channels, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Mix along C."""
        y_BTC: Tensor = self.out(self.widen(x_BTC).relu().square())
        return y_BTC


class Block(nn.Module):
    """Attention, then a network of two layers, each added to what comes in."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(size.channels)
        self.attention = Attention(size)
        self.norm_network = nn.LayerNorm(size.channels)
        self.network = Network(size)
        self.dropout = nn.Dropout(size.dropout)

    def forward(self, x_BTC: Tensor) -> Tensor:
        """Return the input, changed a little."""
        x_BTC = x_BTC + self.dropout(self.attention(self.norm_attention(x_BTC)))
        y_BTC: Tensor = x_BTC + self.dropout(self.network(self.norm_network(x_BTC)))
        return y_BTC


class GPT(nn.Module):
    """Bytes in, a score for each possible next byte out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.context = size.context
        self.byte = nn.Embedding(VOCABULARY, size.channels)
        self.blocks = nn.Sequential(*(Block(size) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.channels)
        self.head = nn.Linear(size.channels, VOCABULARY, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                # What is added to the running sum starts small: 2 * layers of them come together.
                added = name.endswith("out.weight")
                std = size.channels**-0.5 * (0.5 / size.layers**0.5 if added else 1.0)
                nn.init.normal_(parameter, std=std)
        nn.init.normal_(self.head.weight, std=0.5 * size.channels**-0.5)
        self.head.weight = self.byte.weight  # the same vectors read and write

    def forward(self, x_BT: Tensor) -> Tensor:
        """Return scores_BTV for the byte that follows each place."""
        scores: Tensor = self.head(self.norm(self.blocks(self.byte(x_BT))))
        return scores

    def loss(self, x_BT: Tensor, y_BT: Tensor) -> Tensor:
        """Return the mean cross-entropy of the following bytes, in nats."""
        return F.cross_entropy(self(x_BT).flatten(0, 1), y_BT.flatten())

    @torch.no_grad()
    def continuation(self, prompt: bytes, length: int, *, seed: int = 0, heat: float = 0.8) -> str:
        """Write `length` bytes after `prompt`; the same weights and seed write the same."""
        device = self.byte.weight.device
        generator = torch.Generator().manual_seed(seed)
        text = list(prompt)
        was_training = self.training
        self.eval()
        for _ in range(length):
            x_BT = torch.tensor([text[-self.context :]], device=device)
            likely_V = (self(x_BT)[0, -1].float().cpu() / heat).softmax(-1)
            text.append(int(torch.multinomial(likely_V, 1, generator=generator)))
        self.train(was_training)
        return bytes(text).decode(errors="replace")


def weight_groups(model: nn.Module, weight_decay: float) -> list[dict[str, object]]:
    """Split parameters for an optimizer: matrices decay, vectors (norms, biases) do not."""
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    return [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
