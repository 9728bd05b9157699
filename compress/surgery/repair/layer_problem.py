"""One layer of the cut network as a least squares problem: its inputs there, and its outputs before the cut."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from compress.distributed import all_gather_object, all_reduce_sum, rank

from ..plan import Plan
from ..slicing import match_memory_format
from .kept_positions import kept_index, kept_scales
from .layer_samples import channel_rows, draw_rows, input_rows, num_fitted, num_groups, num_unknowns, output_rows
from .regression import Fit, Sums, relative_error, solve

ROWS_PER_UNKNOWN = 16  # sampled from all batches
FEWEST_ROWS, FEWEST_ROWS_OF_GROUPS = 8192, 2048  # depthwise: few unknowns in each of many systems
MOST_UNKNOWNS = 1536  # of a convolution; above, its channels are predicted instead of its outputs
MOST_INPUTS = 8192  # of any layer: the matrix of a system has so many rows
UNCHANGED = {torch.float64: 1e-20}  # relative squared errors below are rounding
UNCHANGED_SINGLE = 1e-9


@dataclass(frozen=True)
class LayerRepair:
    """Result of one layer; the errors are relative to the variance of its outputs, on held-out images."""

    name: str
    error_before: float | None = None
    error_after: float | None = None
    ridge: float | None = None
    reason: str = ""  # why the layer was left as it is
    is_reader: bool = False  # the cut removed inputs of it
    samples: int = 0
    unknowns: int = 0

    @property
    def is_solved(self) -> bool:
        """Return whether the layer has new weights."""
        return not self.reason


class LayerProblem:
    """Sums of samples of one layer; `solve_` writes the solution to the layer of the cut network.

    A wide convolution is solved in a cheaper way: its input channels before the cut are predicted from those of the cut
    network, x = T x' (one system for all taps), and its weights become W T.
    """

    def __init__(
        self,
        name: str,
        layer: nn.Module,
        reference: nn.Module,
        plan: Plan,
        batches: int,
        row_mix: Tensor | None = None,
    ) -> None:
        """Prepare the sums.

        Args:
            layer: the layer of the cut network.
            reference: the same layer before the cut.
            plan: the cut.
            batches: number of batches of all processes.
            row_mix: makes the outputs from those before the cut, if they are not just a part of them; shape
                (outputs, outputs before the cut).
        """
        self.name, self.layer, self.reference = name, layer, reference
        weight, dense = layer.weight, reference.weight
        assert isinstance(weight, Tensor) and isinstance(dense, Tensor)
        self._rows, self._columns = (kept_index(plan, f"{name}.weight", d, dense) for d in (0, 1))
        self._row_scale, self._column_scale = (kept_scales(plan, f"{name}.weight", d, dense) for d in (0, 1))
        self._row_mix = row_mix
        self.predicts_channels = weight.ndim > 2 and num_unknowns(layer) > MOST_UNKNOWNS and num_groups(layer) == 1
        unknowns = weight.shape[1] if self.predicts_channels else num_unknowns(layer)
        fewest = FEWEST_ROWS if num_groups(layer) == 1 else FEWEST_ROWS_OF_GROUPS
        self.count = -(-max(ROWS_PER_UNKNOWN * unknowns, fewest) // batches)
        self.unknowns = unknowns
        self._is_double = weight.dtype == torch.float64
        self._dtype = torch.float64 if self._is_double else torch.float32
        self._sums: tuple[Sums, Sums] | None = None
        self._shapes_differ = False
        self._shift: tuple[Tensor, Tensor] | None = None

    @torch.no_grad()
    def add_(self, batch: int, x: Tensor, reference_x: Tensor, output: Tensor) -> None:
        """Add samples of one batch: the layer's input in the cut network, and input and output before the cut."""
        layer, key = self.layer, f"{self.name}/{batch}"
        channel_dim = -1 if isinstance(layer, nn.Linear) else 1
        if _other_sizes(x, channel_dim) != _other_sizes(reference_x, channel_dim):
            self._shapes_differ = True  # such as proposals of a detector
            return
        if self.predicts_channels:
            rows = draw_rows(x.shape, False, self.count, key)
            total = len(x) * math.prod(x.shape[2:])
            inputs, outputs = channel_rows(x, rows), channel_rows(reference_x, rows) * self._channel_weights
        else:
            is_linear = isinstance(layer, nn.Linear)
            rows = draw_rows(output.shape, is_linear, self.count, key)
            total = output.numel() // output.shape[-1 if is_linear else 1]
            outputs = self._targets(output_rows(self.reference, output, rows))
            inputs = input_rows(layer, x, output.shape, rows)
            outputs = outputs.view(len(rows), num_groups(layer), -1)
        inputs, outputs = inputs.to(self._dtype), outputs.to(self._dtype)
        if self._sums is None:
            self._begin(inputs, outputs)
        assert self._sums is not None and self._shift is not None
        inputs, outputs = inputs - self._shift[0], outputs - self._shift[1]
        fitted = num_fitted(rows, total)
        for sums, part in zip(self._sums, (slice(fitted), slice(fitted, None)), strict=True):
            sums.add_(inputs[part], outputs[part])

    def _targets(self, outputs: Tensor) -> Tensor:
        """Return what the layer should give where it gave these outputs before the cut."""
        if self._row_mix is not None:
            return outputs.to(self._dtype) @ self._row_mix.to(self._dtype).mT
        return outputs[:, self._rows] * self._row_scale

    def _begin(self, inputs: Tensor, outputs: Tensor) -> None:
        """Start the sums; samples are shifted by the means of the first batch, so that products lose no digits."""
        groups, widths = inputs.shape[1], (inputs.shape[2], outputs.shape[2])
        self._sums = (
            Sums.zeros(groups, *widths, inputs.device),
            Sums.zeros(groups, *widths, inputs.device),
        )
        means = torch.cat([inputs.mean(0).flatten(), outputs.mean(0).flatten()]).double()
        means = all_reduce_sum(means if rank() == 0 else torch.zeros_like(means), len(means)).to(inputs)
        x_mean, y_mean = torch.split(means.nan_to_num(0, 0, 0), [groups * width for width in widths])
        self._shift = x_mean.view(groups, -1), y_mean.view(groups, -1)

    @torch.no_grad()
    def solve_(self) -> LayerRepair:
        """Solve the system and write the solution to the layer, if it is better than what the layer has."""
        if self._sums is None or self._shift is None:
            return LayerRepair(self.name, reason="no calibration batch reaches it")
        if any(all_gather_object(self._shapes_differ)):
            return LayerRepair(self.name, reason="its input has another shape than before the cut")
        fit, test = (sums.all_reduced() for sums in self._sums)
        self._sums = None
        if not fit.is_finite or not test.is_finite:
            return LayerRepair(self.name, reason="its activations are not finite")
        weight, bias = self._given()
        x_shift, y_shift = (shift.double() for shift in self._shift)
        shifted_bias = bias + (weight @ x_shift[..., None])[..., 0] - y_shift
        total_error = relative_error(fit + test, weight, shifted_bias)
        if total_error <= UNCHANGED.get(self._dtype, UNCHANGED_SINGLE):
            return LayerRepair(self.name, total_error, total_error, reason="it has nothing to repair")
        given, best = solve(fit, test, weight, shifted_bias, exact=self._is_double)
        if best.ridge is None:
            return LayerRepair(self.name, given.error, given.error, reason="no solution lowers its error")
        self._write(best, best.bias + y_shift - (best.weight @ x_shift[..., None])[..., 0])
        count = int(fit.count + test.count)
        return LayerRepair(self.name, given.error, best.error, best.ridge, samples=count, unknowns=self.unknowns)

    @property
    def _channel_weights(self) -> Tensor:
        """Norm of the weights that read each input channel before the cut: errors count by it."""
        weight = self.reference.weight
        assert isinstance(weight, Tensor)
        norms: Tensor = weight.transpose(0, 1).flatten(1).norm(dim=1).clamp_min(1e-12)
        return norms

    def _given(self) -> tuple[Tensor, Tensor]:
        """Return the weights and the bias that the layer has, of shape (groups, O, D) and (groups, O)."""
        weight, bias = self.layer.weight, self.layer.bias
        assert isinstance(weight, Tensor)
        if self.predicts_channels:
            norms = self._channel_weights.double()
            selection = norms.new_zeros(len(norms), weight.shape[1])
            places = torch.arange(weight.shape[1], device=weight.device)
            selection[self._columns, places] = self._column_scale.double()
            selection *= norms[:, None]
            return selection[None], selection.new_zeros(1, len(selection))
        groups = num_groups(self.layer)
        weights = weight.double().flatten(1).view(groups, -1, num_unknowns(self.layer))
        biases = bias.double() if isinstance(bias, Tensor) else weights.new_zeros(len(weight))
        return weights, biases.view(groups, -1)

    def _write(self, best: Fit, bias: Tensor) -> None:
        weight, reference = self.layer.weight, self.reference
        assert isinstance(weight, Tensor)
        if self.predicts_channels:
            norms = self._channel_weights.double()
            dense: Tensor = reference.weight[self._rows].double()  # type: ignore[index]
            dense *= self._row_scale.double().view(-1, *[1] * (dense.ndim - 1))
            solution = torch.einsum("oc...,ci->oi...", dense, best.weight[0] / norms[:, None])
            shift = dense.flatten(2).sum(2) @ (bias[0] / norms)
            before = self.layer.bias
            new_bias = shift + (before.double() if isinstance(before, Tensor) else 0)
        else:
            solution, new_bias = best.weight.reshape(weight.shape), bias.flatten()
        # New parameters: the network before the cut may share the old ones.
        for leaf, value in (("weight", match_memory_format(solution, weight)), ("bias", new_bias)):
            old = self.layer._parameters[leaf]
            trained = weight.requires_grad if old is None else old.requires_grad
            self.layer._parameters[leaf] = nn.Parameter(value.to(weight.dtype), requires_grad=trained)


def _other_sizes(x: Tensor, channel_dim: int) -> list[int]:
    sizes = list(x.shape)
    del sizes[channel_dim]
    return sizes
