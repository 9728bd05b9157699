"""Building blocks of attention at any width, for compact forms."""

# mypy: disable-error-code="no-untyped-call"

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def split_qkv(x: Tensor, value_width: int, dim: int = -1) -> tuple[Tensor, ...]:
    """Split a fused projection into queries, keys and values; queries and keys share what the values leave."""
    key_width = (x.shape[dim] - value_width) // 2
    return torch.split_with_sizes(x, [key_width, key_width, value_width], dim)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """Reshape (batch, tokens, width) to (batch, heads, tokens, width of a head)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """Reshape (batch, heads, tokens, width of a head) to (batch, tokens, width)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """Return softmax(scale q k^T + bias) v; pass the scale of the dense width."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def attend_with_scores(scores: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """Return softmax(scores) v."""
    return F.dropout(scores.softmax(-1), dropout) @ v


def cosine_scores(q: Tensor, k: Tensor, logit_scale: Tensor) -> Tensor:
    """Return the scores of Swin v2: cosine of queries and keys, times a factor per head of at most 100."""
    factor = logit_scale.clamp(max=float(torch.log(torch.tensor(100.0)))).exp()
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * factor


def zero_key_bias(bias: Tensor, value_width: int) -> Tensor:
    """Return a fused bias of queries, keys and values with the part of the keys set to zero."""
    q, k, v = split_qkv(bias, value_width)
    return torch.cat([q, torch.zeros_like(k), v])


class WindowPartition:
    """Partition of a padded and shifted map of two or three dimensions into windows, and its inverse."""

    def __init__(self, x: Tensor, window: list[int], shift: list[int]) -> None:
        self.size, self.window = x.shape[1:-1], window
        self.counts = [-(-size // w) for size, w in zip(self.size, window, strict=True)]
        self.padded = [count * w for count, w in zip(self.counts, window, strict=True)]
        self.shift = [0 if w >= p else s for s, w, p in zip(shift, window, self.padded, strict=True)]
        self.dims = list(range(1, len(window) + 1))

    def split(self, x: Tensor) -> Tensor:
        """Reshape (batch, *size, channels) to (batch * windows, tokens, channels)."""
        last = self.dims[-1]
        missing = [padded - size for padded, size in zip(self.padded, self.size, strict=True)]
        x = F.pad(x, (0, 0, *(end for count in reversed(missing) for end in (0, count))))
        if any(self.shift):
            x = x.roll([-s for s in self.shift], self.dims)
        for dim in reversed(self.dims):
            x = x.unflatten(dim, (self.counts[dim - 1], self.window[dim - 1]))
        x = x.permute(0, *(2 * dim - 1 for dim in self.dims), *(2 * dim for dim in self.dims), -1)
        return x.flatten(last + 1, 2 * last).flatten(0, last)

    def join(self, x: Tensor) -> Tensor:
        """Reshape (batch * windows, tokens, channels) to (batch, *size, channels)."""
        last = self.dims[-1]
        x = x.unflatten(0, (-1, *self.counts)).unflatten(last + 1, self.window)
        x = x.permute(0, *(d for dim in self.dims for d in (dim, last + dim)), -1)
        for dim in self.dims:
            x = x.flatten(dim, dim + 1)
        if any(self.shift):
            x = x.roll(self.shift, self.dims)
        for dim, size in zip(self.dims, self.size, strict=True):
            x = x.narrow(dim, 0, size)
        return x.contiguous()

    def mask(self, like: Tensor) -> Tensor | None:
        """Return -100 between tokens that only the shift made neighbors, shape (windows, 1, tokens, tokens)."""
        if not any(self.shift):
            return None
        region = torch.zeros((), dtype=torch.long, device=like.device)
        for padded, window, shift in zip(self.padded, self.window, self.shift, strict=True):
            position = torch.arange(padded, device=like.device)
            side = (position >= padded - window).to(torch.long) + (position >= padded - shift)
            region = 3 * region[..., None] + (side if shift else torch.zeros_like(side))
        region = region[None, ..., None]
        region_of_token = WindowPartition(region, self.window, [0] * len(self.window)).split(region)[..., 0]
        separate = region_of_token[:, None, :] != region_of_token[:, :, None]
        return torch.zeros(separate.shape, dtype=like.dtype, device=like.device).masked_fill(separate, -100.0)[:, None]
