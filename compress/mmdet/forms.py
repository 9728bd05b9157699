"""The compact form of mmdet's window attention, whose code takes the width of a head from that of its input."""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from torch import Tensor

from ..attention import compact, join_heads, split_heads, weigh
from .ops import install

install()

from mmdet.models.backbones import swin  # noqa: E402  (it imports mmcv's ops)


@compact
class WindowMSA(swin.WindowMSA):
    """mmdet's Swin."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        q, k, v = (split_heads(t, self.num_heads) for t in self.qkv(x).chunk(3, -1))
        area = self.window_size[0] * self.window_size[1]
        bias = self.relative_position_bias_table[self.relative_position_index.flatten()].unflatten(0, (area, area))
        scores = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1)
        if mask is not None:
            scores = (scores.unflatten(0, (-1, len(mask))) + mask[:, None]).flatten(0, 1)
        out: Tensor = self.proj(join_heads(weigh(scores, v, self.attn_drop.p if self.training else 0.0)))
        return self.proj_drop(out)  # type: ignore[no-any-return]
