"""Compact form of mmdet's window attention, whose own code derives the head width from the input width."""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from mmdet.models.backbones import swin
from torch import Tensor

from compress.modules import attend_with_scores, join_heads, register_compact_form, split_heads


@register_compact_form
class WindowMSA(swin.WindowMSA):
    """Window attention of mmdet's Swin with heads of any width."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        area = self.window_size[0] * self.window_size[1]
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()].unflatten(0, (area, area))
        scores = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        dropout = self.attn_drop.p if self.training else 0.0
        out: Tensor = self.proj(join_heads(attend_with_scores(scores, v, dropout)))
        return self.proj_drop(out)  # type: ignore[no-any-return]
