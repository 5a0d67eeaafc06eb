# SPDX-License-Identifier: Apache-2.0
"""The model that the demo trains, and the token stream that it learns."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Neither 2 nor 4 divides it, so the embedding rows of 4 ranks straddle those of 2, and loading has to cut shards.
VOCABULARY = 1003
# The stream uses only these first symbols. The model learns that quickly, so the loss falls within a few steps.
ALPHABET = 61
CONTEXT = 64


@dataclass(frozen=True)
class ModelConfig:
    """Size of the decoder; ``width`` is a multiple of ``head_dim``."""

    layers: int
    width: int
    head_dim: int = 64


class Block(nn.Module):
    """Pre-norm attention and feed-forward, each added to its input of shape (batch, time, width)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        self.attention_norm = nn.RMSNorm(config.width)
        self.query_key_value = nn.Linear(config.width, 3 * config.width, bias=False)
        self.projection = nn.Linear(config.width, config.width, bias=False)
        self.feed_forward_norm = nn.RMSNorm(config.width)
        self.expand = nn.Linear(config.width, 4 * config.width)
        self.contract = nn.Linear(4 * config.width, config.width)

    def forward(self, hidden: Tensor) -> Tensor:
        packed = self.query_key_value(self.attention_norm(hidden))
        query, key, value = (
            part.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for part in packed.chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        hidden = hidden + self.projection(mixed.transpose(1, 2).flatten(2))
        return hidden + self.contract(F.gelu(self.expand(self.feed_forward_norm(hidden))))


class Decoder(nn.Module):
    """Maps token ids of shape (batch, time) to logits of shape (batch, time, vocabulary)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, config.width)
        self.position = nn.Parameter(torch.randn(CONTEXT, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.width)
        self.head = nn.Linear(config.width, VOCABULARY, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden)
        return self.head(self.norm(hidden))


def global_batch(step: int, num_sequences: int, seed: int) -> Tensor:
    """Draws the tokens of a step, of shape (num_sequences, CONTEXT + 1), for all ranks together.

    The result depends only on the arguments, so a job resumed on another number of ranks sees the same data. Every
    sequence walks around the alphabet with its own stride, which its first two tokens reveal.
    """
    generator = torch.Generator().manual_seed(1_000_003 * seed + step)
    start = torch.randint(ALPHABET, (num_sequences, 1), generator=generator)
    stride = torch.randint(1, 4, (num_sequences, 1), generator=generator)
    return (start + stride * torch.arange(CONTEXT + 1)) % ALPHABET


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Returns the mean cross entropy, a scalar, of predicting ``tokens[:, 1:]`` from the tokens before."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
