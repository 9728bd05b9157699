"""Small networks with one special feature each: a norm, a bare parameter, a tie, a layout."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .case import Net, case
from .networks_plain import cbr, head


@case(3, 8, 8, groups=2)
def outputs_in_a_tuple() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        x = m.body(x)
        return m.boxes(x), m.scores(x).flatten(1)

    return Net(run, body=nn.Sequential(cbr(3, 6), cbr(6, 7)), boxes=nn.Conv2d(7, 4, 1), scores=nn.Conv2d(7, 2, 3))


@case(3, 8, 8, groups=2, refused="output of the network")
def outputs_in_a_dict() -> nn.Module:
    def run(m: Any, x: Tensor) -> dict[str, Any]:
        a = m.stem(x)
        b = m.visible(a)
        return {"features": b, "more": [m.head(m.last(b))]}

    return Net(run, stem=cbr(3, 6), visible=cbr(6, 5), last=cbr(5, 7), head=head(7))


@case(3, 8, 8, groups=2)
def module_used_twice() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.last(m.norm2(m.shared(F.relu(m.norm1(m.shared(x))))))

    norms = {"norm1": nn.BatchNorm2d(6), "norm2": nn.BatchNorm2d(6)}
    last = nn.Sequential(nn.Conv2d(6, 5, 1), nn.ReLU(), nn.Conv2d(5, 3, 1))
    return Net(run, stem=cbr(3, 6), shared=nn.Conv2d(6, 6, 3, padding=1), last=last, **norms)


@case(3, 8, 8, groups=3)
def head_shared_by_two_levels() -> nn.Module:
    def run(m: Any, x: Tensor) -> tuple[Tensor, Tensor]:
        a = m.a(x)
        return m.shared(a), m.shared(m.b(a))

    shared = nn.Sequential(nn.Conv2d(6, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 2, 1))
    return Net(run, a=cbr(3, 6), b=nn.Sequential(cbr(6, 8, stride=2), cbr(8, 6)), shared=shared)


@case(3, 8, 8, groups=2)
def tied_weights() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.one(x) - m.last(torch.sigmoid(m.two(F.avg_pool2d(x, 2)))).mean((2, 3), keepdim=True).mean()

    net = Net(run, stem=cbr(3, 6), one=nn.Conv2d(6, 6, 1), two=nn.Conv2d(6, 6, 1), last=nn.Conv2d(6, 4, 1))
    net.one = nn.Sequential(net.one, nn.ReLU(), nn.Conv2d(6, 4, 1))
    net.two.weight = net.one[0].weight
    return net


@case(10, groups=0, refused="both an input and an output of the same parameter")
def tied_autoencoder() -> nn.Module:
    return Net(lambda m, x: F.linear(torch.relu(m.code(x)), m.code.weight.t()), code=nn.Linear(10, 6))


@case(3, 5, 5, groups=3)
def transposed_convolutions() -> nn.Module:
    deep = nn.ConvTranspose2d(6, 6, 3, 2, 1, 1, groups=6)
    grouped = nn.ConvTranspose2d(6, 12, 2, 2, groups=2)
    last = [nn.ReLU(), nn.ConvTranspose2d(12, 4, 3), nn.Sigmoid(), nn.Conv2d(4, 2, 1)]
    return nn.Sequential(nn.ConvTranspose2d(3, 6, 3), nn.BatchNorm2d(6), deep, nn.ReLU(), grouped, *last)


@case(3, 5, 5, groups=2)
def transposed_convolution_in_few_large_groups() -> nn.Module:
    grouped = nn.ConvTranspose2d(12, 8, 3, groups=2, bias=True)
    return nn.Sequential(cbr(3, 12), grouped, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 3, 1))


@case(3, 5, 5, groups=2)
def transposed_convolution_in_many_small_groups() -> nn.Module:
    grouped = nn.ConvTranspose2d(12, 18, 3, groups=6, bias=True)
    return nn.Sequential(cbr(3, 12), grouped, nn.BatchNorm2d(18), nn.ReLU(), nn.Conv2d(18, 4, 1), nn.Conv2d(4, 2, 1))


@case(4, 12, groups=3)
def one_dimensional() -> nn.Module:
    depth = nn.Conv1d(6, 6, 3, padding=2, dilation=2, groups=6)
    last = [nn.Conv1d(6, 8, 1), nn.LeakyReLU(), nn.AdaptiveMaxPool1d(2), nn.Flatten(), nn.Linear(16, 6)]
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), depth, nn.ELU(), *last, nn.Mish(), nn.Linear(6, 2))


@case(2, 5, 6, 5, groups=2)
def three_dimensional() -> nn.Module:
    second = [nn.Conv3d(5, 6, (1, 3, 1)), nn.InstanceNorm3d(6, affine=True), nn.ReLU(), nn.AdaptiveAvgPool3d(1)]
    return nn.Sequential(nn.Conv3d(2, 5, 3), nn.BatchNorm3d(5), nn.ReLU(), *second, nn.Flatten(), nn.Linear(6, 3))


@case(3, 8, 8, groups=1)
def group_norm_of_single_channels() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.GroupNorm(6, 6), nn.ReLU(), nn.Conv2d(6, 3, 3))


@case(3, 8, 8, groups=2)
def group_norm_that_mixes_a_few() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 12, 3), nn.GroupNorm(4, 12), nn.ReLU(), cbr(12, 6), nn.Conv2d(6, 3, 3))


@case(3, 8, 8, groups=1, refused="mixed by a group norm")
def group_norm_that_mixes_all() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.GroupNorm(1, 8), nn.ReLU(), cbr(8, 6), nn.Conv2d(6, 3, 3))


@case(3, 8, 8, groups=1, refused="mixed by a layer norm")
def layer_norm_over_channels() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.norm(m.stem(x).permute(0, 2, 3, 1))
        return m.down(F.gelu(m.up(x))).mean((1, 2))

    parts = {"stem": nn.Conv2d(3, 6, 3), "norm": nn.LayerNorm(6), "up": nn.Linear(6, 9), "down": nn.Linear(9, 4)}
    return Net(run, **parts)


@case(3, 8, 8, groups=1)
def layer_norm_over_space() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.LayerNorm([6, 6]), nn.ReLU(), nn.Conv2d(6, 3, 3))


@case(3, 8, 8, groups=2)
def instance_norm_with_statistics() -> nn.Module:
    norm = nn.InstanceNorm2d(6, affine=True, track_running_stats=True)
    return nn.Sequential(nn.Conv2d(3, 6, 3), norm, nn.ReLU(), nn.Conv2d(6, 5, 3), nn.InstanceNorm2d(5), head(5))


@case(3, 8, 8, groups=2)
def slope_per_channel() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 6, 3), nn.PReLU(6), nn.Conv2d(6, 5, 3), nn.PReLU(), nn.Conv2d(5, 3, 1))


@case(3, 8, 8, groups=2)
def layer_scale() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.head(x + m.scale * m.conv2(m.conv1(x)) + m.shift)

    bare = {"scale": nn.Parameter(torch.ones(6, 1, 1)), "shift": nn.Parameter(torch.zeros(1, 6, 1, 1))}
    return Net(run, stem=cbr(3, 6), conv1=cbr(6, 8), conv2=nn.Conv2d(8, 6, 1), head=head(6), **bare)


@case(3, 8, 8, groups=2)
def layer_scale_in_channels_last() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x).permute(0, 2, 3, 1)
        x = x + m.gamma * m.down(F.gelu(m.up(x)))
        return m.head(x.permute(0, 3, 1, 2))

    return Net(
        run, stem=cbr(3, 6), up=nn.Linear(6, 9), down=nn.Linear(9, 6), gamma=nn.Parameter(torch.ones(6)), head=head(6)
    )


@case(3, 5, 5, groups=2)
def pixel_shuffle() -> nn.Module:
    return nn.Sequential(cbr(3, 20), nn.PixelShuffle(2), nn.ReLU(), nn.Conv2d(5, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1))


@case(3, 8, 8, groups=2)
def pixel_unshuffle() -> nn.Module:
    return nn.Sequential(cbr(3, 5), nn.PixelUnshuffle(2), nn.Conv2d(20, 6, 3), nn.ReLU(), nn.Conv2d(6, 2, 1))


@case(3, 8, 8, groups=2)
def gated_linear_unit() -> nn.Module:
    return nn.Sequential(cbr(3, 12), nn.GLU(1), nn.Conv2d(6, 8, 1), nn.GLU(1), nn.Conv2d(4, 2, 3))


@case(3, 8, 8, groups=1)
def both_signs() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x)
        return m.last(torch.cat([F.relu(x), F.relu(-x)], 1))

    return Net(run, stem=nn.Conv2d(3, 6, 3), last=nn.Conv2d(12, 4, 3))


@case(3, 8, 8, groups=2)
def functional_calls() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.relu(F.conv2d(x, m.conv.weight, m.conv.bias, padding=1))
        x = F.conv2d(x, m.kernel, padding=1).mean((2, 3))
        return F.linear(F.silu(x), m.last.weight) + m.last.bias

    return Net(run, conv=nn.Conv2d(3, 6, 3), kernel=nn.Parameter(torch.randn(7, 6, 3, 3)), last=nn.Linear(7, 3))


@case(3, 8, 8, groups=3)
def products_with_parameters() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = m.stem(x).flatten(2).transpose(1, 2)
        x = torch.relu(x @ m.first + m.shift)
        x = torch.einsum("bnc,dc->bnd", x, m.second)
        return torch.matmul(torch.tanh(x), m.third).mean(1)

    bare = {"first": (6, 7), "shift": (7,), "second": (5, 7), "third": (5, 3)}
    return Net(run, stem=cbr(3, 6), **{name: nn.Parameter(torch.randn(shape)) for name, shape in bare.items()})


@case(3, 8, 8, groups=3)
def frozen_stem() -> nn.Module:
    net = nn.Sequential(cbr(3, 6), cbr(6, 7), cbr(7, 5), head(5))
    for parameter in [*net[0].parameters(), *net[1].parameters()]:
        parameter.requires_grad = False
    return net


@case(3, 8, 8, groups=3)
def auxiliary_head_in_training() -> nn.Module:
    def run(m: Any, x: Tensor) -> Any:
        x = m.stage1(x)
        y = m.head(m.stage2(x))
        return (y, m.aux(x)) if m.training else y

    aux = nn.Sequential(cbr(6, 5), head(5))
    return Net(run, stage1=cbr(3, 6), stage2=cbr(6, 7), head=head(7), aux=aux)


@case(6, groups=2)
def embedding_and_mixing_of_tokens() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        tokens = (x > 0).long()
        x = m.table(tokens)
        x = x + m.down(F.gelu(m.up(x)))
        return m.last(x.mean(1))

    return Net(run, table=nn.Embedding(3, 8), up=nn.Linear(8, 9), down=nn.Linear(9, 8), last=nn.Linear(8, 3))


@case(3, 8, 8, groups=2)
def unfolded_patches() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        x = F.unfold(m.stem(x), 2, stride=2).transpose(1, 2)
        return m.last(F.relu(m.embed(x))).mean(1)

    return Net(run, stem=cbr(3, 6), embed=nn.Linear(24, 7), last=nn.Linear(7, 3))


@case(3, 8, 8, groups=2)
def weights_of_selective_kernels() -> nn.Module:
    def run(m: Any, x: Tensor) -> Tensor:
        both = torch.stack([m.a(x), m.b(x)], 1)
        weight = m.expand(F.relu(m.reduce(both.sum(1).mean((2, 3), keepdim=True))))
        weight = weight.view(x.shape[0], 2, both.shape[2], 1, 1).softmax(1)
        return m.last((both * weight).sum(1))

    a, b = nn.Conv2d(3, 6, 3, padding=1), nn.Conv2d(3, 6, 1)
    return Net(run, a=a, b=b, reduce=nn.Conv2d(6, 4, 1), expand=nn.Conv2d(4, 12, 1), last=nn.Conv2d(6, 3, 1))
