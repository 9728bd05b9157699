"""Variants of mmdet's Swin modules for images of any size.

mmdet's own code branches on sizes and computes with them as floats, which torch.export cannot trace for dynamic sizes.
The variants compute the same function. Between blocks a map stays (batch, height, width, channels) instead of a
sequence of tokens. A module switches to its variant by its `__class__` alone, as compact forms do.
"""

# mypy: disable-error-code="no-untyped-call,misc"

from __future__ import annotations

from typing import Any

from mmdet.models.backbones import swin
from mmdet.models.layers.transformer import utils as patches
from torch import Tensor, nn

from compress.exporters import merge_windows, pad_to_multiple, partition_windows
from compress.modules import attend_with_scores, join_heads, split_heads

from .compact_forms import WindowMSA


class DynamicPatchEmbed(patches.PatchEmbed):
    """Patch embedding that pads the image and returns a map."""

    def forward(self, x: Tensor) -> tuple[Tensor, tuple[int, int]]:
        x = self.projection(pad_to_multiple(x, *self.projection.stride, 0.0)).permute(0, 2, 3, 1)
        return self.norm(x) if self.norm is not None else x, (x.shape[1], x.shape[2])


class DynamicPatchMerging(patches.PatchMerging):
    """Patch merging that concatenates neighboring patches, in the channel order of `nn.Unfold`."""

    def forward(self, x: Tensor, input_size: Any) -> tuple[Tensor, tuple[int, int]]:
        down, right = self.sampler.stride
        x = pad_to_multiple(x.permute(0, 3, 1, 2), down, right, 0.0)
        x = x.unflatten(3, (-1, right)).unflatten(2, (-1, down)).permute(0, 2, 4, 1, 3, 5).flatten(3)
        x = self.reduction(self.norm(x) if self.norm is not None else x)
        return x, (x.shape[1], x.shape[2])


class DynamicShiftWindowMSA(swin.ShiftWindowMSA):
    """Attention in windows over a map that is padded to whole windows and, in every other block, shifted."""

    def forward(self, query: Tensor, hw_shape: Any) -> Tensor:
        attention, side, shift = self.w_msa, self.window_size, self.shift_size
        x, mask = partition_windows(query, side, shift)
        q, k, v = (split_heads(t, attention.num_heads) for t in attention.qkv(x).chunk(3, -1))
        table, index = attention.relative_position_bias_table, attention.relative_position_index
        bias = table[index.flatten()].unflatten(0, (side**2, side**2)).permute(2, 0, 1)
        scores = (q * attention.scale) @ k.transpose(-2, -1) + bias
        x = attention.proj(join_heads(attend_with_scores(scores + mask if shift else scores, v)))
        return merge_windows(x, query, side, shift)  # type: ignore[no-any-return]


DYNAMIC_FORMS: dict[type[nn.Module], type[nn.Module]] = {
    patches.PatchEmbed: DynamicPatchEmbed,
    patches.PatchMerging: DynamicPatchMerging,
    swin.ShiftWindowMSA: DynamicShiftWindowMSA,
}


def make_size_dynamic_(model: nn.Module) -> None:
    """Switch the modules of Swin backbones, which must be in eval mode, to their variants for any image size."""
    for backbone in model.modules():
        if type(backbone) is swin.SwinTransformer and not backbone.use_abs_pos_embed and _is_supported(backbone):
            for module in backbone.modules():
                module.__class__ = DYNAMIC_FORMS.get(type(module), type(module))


def _is_supported(backbone: Any) -> bool:
    """Return whether patches do not overlap and are padded in the corner, and the attention classes are known."""
    embed, merges = backbone.patch_embed, [m for m in backbone.modules() if isinstance(m, patches.PatchMerging)]
    corner_padding = [m.adap_padding is not None and m.adap_padding.padding == "corner" for m in (embed, *merges)]
    no_overlap = [m.sampler.kernel_size == m.sampler.stride and m.sampler.dilation == (1, 1) for m in merges]
    no_overlap.append(embed.projection.kernel_size == embed.projection.stride)
    known_attention = [type(m.w_msa) in (swin.WindowMSA, WindowMSA) for m in backbone.modules() if hasattr(m, "w_msa")]
    return all(corner_padding + no_overlap + known_attention)
