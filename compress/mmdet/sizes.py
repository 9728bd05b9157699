"""Forms of mmdet's Swin for images of any size: its own code branches on sizes, and computes with them as floats.

Each computes what the original does. Between blocks a map is (batch, height, width, channels), and never a row of
tokens, whose number a graph would have to take apart again. A module takes its form by its `__class__` alone, as
compact attention does.
"""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from ..attention import join_heads, split_heads, weigh
from ..exporters.operators import padded, whole, windows
from .forms import WindowMSA

# isort: split
from mmdet.models.backbones import swin
from mmdet.models.layers.transformer import utils as patches


class Embedding(patches.PatchEmbed):
    """Patches of a padded image as places of a map."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.projection(padded(x, *self.projection.stride, 0.0)).permute(0, 2, 3, 1)
        return self.norm(x) if self.norm is not None else x, (x.shape[1], x.shape[2])


class Merging(patches.PatchMerging):
    """Patches side by side become channels of one, as `nn.Unfold` has them where kernels do not overlap."""

    def forward(self, x: Tensor, input_size: Any) -> tuple[Tensor, tuple[int, int]]:
        down, right = self.sampler.stride
        x = padded(x.permute(0, 3, 1, 2), down, right, 0.0)
        x = x.unflatten(3, (-1, right)).unflatten(2, (-1, down)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        x = self.reduction(self.norm(x) if self.norm is not None else x)
        return x, (x.shape[1], x.shape[2])


class ShiftWindow(swin.ShiftWindowMSA):
    """Attention in windows, over a map that is padded to whole ones and may be shifted by a part of one."""

    def forward(self, query: Tensor, hw_shape: Any) -> Tensor:
        attention, side, shift = self.w_msa, self.window_size, self.shift_size
        x, apart = windows(query, side, shift)
        q, k, v = (split_heads(t, attention.num_heads) for t in attention.qkv(x).chunk(3, -1))
        table, index = attention.relative_position_bias_table, attention.relative_position_index
        bias = table[index.flatten()].unflatten(0, (side**2, side**2)).permute(2, 0, 1)
        scores = (q * attention.scale) @ k.transpose(-2, -1) + bias
        x = attention.proj(join_heads(weigh(scores + apart if shift else scores, v)))
        return whole(x, query, side, shift)  # type: ignore[no-any-return]


FORMS: dict[type[nn.Module], type[nn.Module]] = {
    patches.PatchEmbed: Embedding,
    patches.PatchMerging: Merging,
    swin.ShiftWindowMSA: ShiftWindow,
}


def free_(model: nn.Module) -> None:
    """Give Swin backbones, in eval mode, their form for images of any size; the function stays the same."""
    for backbone in model.modules():
        if type(backbone) is swin.SwinTransformer and not backbone.use_abs_pos_embed and _fits(backbone):
            for module in backbone.modules():
                module.__class__ = FORMS.get(type(module), type(module))


def _fits(backbone: Any) -> bool:
    """Whether patches lie next to each other, padded in the corner, and attention is as we know it."""
    embed, merges = backbone.patch_embed, [m for m in backbone.modules() if isinstance(m, patches.PatchMerging)]
    plain = [m.adap_padding is not None and m.adap_padding.padding == "corner" for m in (embed, *merges)]
    side_by_side = [m.sampler.kernel_size == m.sampler.stride and m.sampler.dilation == (1, 1) for m in merges]
    same = embed.projection.kernel_size == embed.projection.stride
    known = [type(m.w_msa) in (swin.WindowMSA, WindowMSA) for m in backbone.modules() if hasattr(m, "w_msa")]
    return same and all(plain + side_by_side + known)
