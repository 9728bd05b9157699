"""Training flags of modules are set during a block and restored afterwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from compress.modules.training_mode import module_mode


@pytest.mark.parametrize("training", [False, True])
def test_every_flag_is_restored_even_after_an_error(training: bool) -> None:
    model = nn.Sequential(nn.Sequential(nn.BatchNorm1d(2), nn.Dropout()), nn.Linear(2, 2))
    model[0].eval()
    before = [m.training for m in model.modules()]
    with pytest.raises(KeyError), module_mode(model, training):
        leaves = [m.training for m in model.modules() if not [*m.children()]]
        containers = [m.training for m in model.modules() if [*m.children()]]
        assert not any(leaves) and all(flag == training for flag in containers)
        raise KeyError
    assert [m.training for m in model.modules()] == before


def test_scripted_modules_get_and_keep_their_modes() -> None:
    model = nn.Sequential(nn.ReLU(), torch.jit.script(nn.Sequential(nn.BatchNorm1d(3), nn.Dropout()))).train()
    x = torch.randn(4, 3)
    with module_mode(model, training=False):
        assert not any(module.training for module in model.modules())
        assert torch.allclose(model(x), x.relu(), atol=1e-4), "new statistics, no dropout"
    assert all(module.training for module in model.modules())
    assert not torch.allclose(model(x), x.relu(), atol=1e-4)
