"""Compact forms of attention: the same function, the same parameters, any width."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import compress
from cases import distance, run
from cases.families import BOTH, FAMILIES, family
from compress import Plan
from compress.modules import (
    attend,
    compact_form_of,
    join_heads,
    register_compact_form,
    register_form_provider,
    split_heads,
    use_compact_forms_,
)


@pytest.mark.parametrize("name", FAMILIES)
def test_compact_form_computes_what_the_original_does(name: str) -> None:
    model, x = family(name)
    changed = use_compact_forms_(copy.deepcopy(model))
    if all(type(a) is type(b) for a, b in zip(model.modules(), changed.modules(), strict=True)):
        pytest.skip("needs no compact form")
    assert distance(run(changed, x), run(model, x)) < 1e-12
    assert list(changed.state_dict()) == list(model.state_dict())


class Known(nn.Module):
    """Attention for one width only: the last reshape takes the width of the input."""

    def __init__(self, width: int = 24, heads: int = 3) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, n, c = x.shape
        q, k, v = self.qkv(x).reshape(b, n, 3, self.heads, c // self.heads).permute(2, 0, 3, 1, 4).unbind(0)
        out = attend(q, k, v, self.scale)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))  # type: ignore[no-any-return]


def test_a_users_own_attention_gets_a_compact_form_in_a_few_lines() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(Known(), nn.Linear(24, 5)).double()
    x = torch.randn(2, 7, 24).double()
    before = compress.find_groups(network, x, BOTH)
    assert not len(before)
    assert any("does not run at another width" in r.reason for r in before.refused)
    assert any(
        "Write a compact form of Known to cut it: see compress/modules/compact_forms.py" in r.reason
        for r in before.refused
    )

    @register_compact_form
    class Told(Known):
        def forward(self, x: Tensor) -> Tensor:
            q, k, v = (split_heads(t, self.heads) for t in self.qkv(x).chunk(3, -1))
            return self.proj(join_heads(attend(q, k, v, self.scale)))  # type: ignore[no-any-return]

    groups = compress.find_groups(network, x, BOTH)
    assert [(g.name, g.width) for g in groups] == [("0.qkv", 8)]
    plan = Plan.build(network, groups, {"0.qkv": [0, 3, 4]})
    zeroed = run(plan.zero_(copy.deepcopy(network)), x)
    assert distance(run(plan.apply_(copy.deepcopy(network)), x), zeroed) < 1e-12
    with pytest.raises(TypeError, match="expected a subclass of the module class that it replaces"):
        register_compact_form(nn.Module)
    with pytest.raises(compress.PlanError, match=r"expected .*Known, which has a compact form; got Linear"):
        plan.apply_(nn.Sequential(nn.Linear(24, 24), nn.Linear(24, 5)))


def test_forms_of_a_package_are_loaded_once_when_one_of_its_classes_is_met() -> None:
    loads: list[str] = []
    foreign = type("Foreign", (nn.Linear,), {"__module__": "a_package.layers"})
    register_form_provider("a_package", lambda: loads.append("loaded"))
    assert compact_form_of(nn.Linear(2, 2)) is None
    assert not loads
    assert compact_form_of(foreign(2, 2)) is None
    assert compact_form_of(foreign(2, 2)) is None
    assert loads == ["loaded"]
