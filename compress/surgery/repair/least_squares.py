"""Least squares repair: solve the layers of a cut network so that it computes what it did before the cut.

For each linear layer or convolution behind the first cut, in the order in which they run:

    W', b' = argmin sum ||W' x' + b' - y||^2 + ridge * ||W' - W_kept||^2

x' is its input in the cut network, in which the layers before it are solved already, and y its output before the cut,
on the same images. So each layer makes up for what its own input lost and for what remains of the errors before it. No
labels are needed. All batches go through both networks once: they wait at each layer until it is solved.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from compress.distributed import all_gather_object, broadcast_module_, broadcast_object, rank, world_size
from compress.modules import is_plain_layer, module_mode, modules_of, tensors_in

from ..plan import Plan
from .attention_repair import AttentionRepair, repair_queries_and_keys_
from .layer_problem import MOST_INPUTS, LayerProblem, LayerRepair
from .layer_samples import num_unknowns
from .paused_forward import PausedForward, pause_at_layers

Forward = Callable[[nn.Module, Any], Any]
MOST_BYTES = 4 * 2**30  # of activations that wait


@dataclass(frozen=True)
class Repair:
    """Result of a repair: the layers, and the outputs of the cut network compared with those before the cut."""

    layers: list[LayerRepair]
    batches: int  # that were used
    unused_batches: int = 0
    error_before: float | None = None  # of the network's outputs on the first batch, relative to their variance
    error_after: float | None = None
    agreement_before: float | None = None  # fraction of images of the first batch with the same best class
    agreement_after: float | None = None
    attentions: list[AttentionRepair] = field(default_factory=list, kw_only=True)  # whose queries and keys are cut

    @property
    def few_samples(self) -> list[str]:
        """Layers that were solved with fewer samples than unknowns: the ridge keeps them near the cut weights."""
        return [layer.name for layer in self.layers if layer.is_solved and layer.samples < layer.unknowns]


@torch.no_grad()
def repair_(
    model: nn.Module,
    reference: nn.Module,
    plan: Plan,
    batches: Sequence[Any],
    forward: Forward,
    *,
    within: Collection[str] | None = None,
    on_layer: Callable[[int, int], None] = lambda done, total: None,
) -> Repair:
    """Solve the layers of a sliced model, in place; layers that get a bias are recorded in the plan.

    Several processes give their own batches each, and get the same solution.

    Args:
        model: the sliced model.
        reference: the model before it was sliced.
        plan: the cut.
        batches: inputs without labels; each is passed to `forward`.
        forward: runs a model on a batch.
        within: solve only layers in these modules; None for all.
        on_layer: is told how many layers are done, of how many.
    """
    with module_mode(model, training=False), module_mode(reference, training=False):
        return _Repairer(model, reference, plan, batches, forward, within, on_layer).run()


class _Repairer:
    def __init__(
        self,
        model: nn.Module,
        reference: nn.Module,
        plan: Plan,
        batches: Sequence[Any],
        forward: Forward,
        within: Collection[str] | None,
        on_layer: Callable[[int, int], None],
    ) -> None:
        self.model, self.reference, self.plan = model, reference, plan
        self.batches, self.forward, self.within, self.on_layer = batches, forward, within, on_layer
        weights = {name.removesuffix(".weight"): dims for name, dims in plan.slices.items() if name.endswith(".weight")}
        transposed = {name for name, m in modules_of(model).items() if isinstance(m, nn.modules.conv._ConvTransposeNd)}
        self.readers = {name for name, dims in weights.items() if (0 if name in transposed else 1) in dims}
        self.row_mixes: dict[str, Tensor] = {}
        self.device = next((p.device for p in model.parameters()), torch.device("cpu"))

    def run(self) -> Repair:
        """Solve all layers and compare the outputs of the first batch."""
        trace, reference_outputs = trace_calls(self.reference, self.batches, self.forward)
        before = self._outputs(self.model)
        attentions, self.row_mixes = repair_queries_and_keys_(
            self.model, self.reference, self.plan, self.batches, self.forward, self._is_within
        )
        names, unsolvable = self._solvable_layers(trace)
        if not (names or self.row_mixes) or not sum(all_gather_object(len(self.batches))):
            return Repair(self._with_readers(unsolvable), 0, attentions=attentions)
        most = max(1, MOST_BYTES // max(1, trace.largest_bytes))
        saved = {name: dict(modules_of(self.model)[name]._parameters) for name in names}
        repair, outputs = self._solve_layers(names, self.batches[:most])
        if any(all_gather_object(not _are_equal(outputs, reference_outputs))):
            # The code keeps values from layer to layer, so that batches which take turns get those of each other.
            for name, parameters in saved.items():
                modules_of(self.model)[name]._parameters.update(parameters)
                if parameters["bias"] is None:
                    self.plan.biases.pop(name, None)
            most = 1
            repair, _ = self._solve_layers(names, self.batches[:most])
        after = self._outputs(self.model)
        broadcast_module_(self.model)
        return Repair(
            self._with_readers(repair + unsolvable),
            sum(all_gather_object(min(most, len(self.batches)))),
            sum(all_gather_object(max(0, len(self.batches) - most))),
            *broadcast_object(_output_errors(reference_outputs, before, after)),
            attentions=attentions,
        )

    def _with_readers(self, layers: list[LayerRepair]) -> list[LayerRepair]:
        return [replace(layer, is_reader=layer.name in self.readers) for layer in layers]

    def _outputs(self, model: nn.Module) -> list[Tensor]:
        """Return the output tensors of this process's first batch."""
        if not self.batches:
            return []
        return _floating_tensors(self.forward(model, self.batches[0]))

    def _solve_layers(self, names: list[str], batches: Sequence[Any]) -> tuple[list[LayerRepair], list[Tensor]]:
        """Solve the layers one after the other; also return the outputs of the first batch before the cut."""
        modules, references = modules_of(self.model), modules_of(self.reference)
        total = sum(all_gather_object(len(batches)))
        results: list[LayerRepair] = []
        outputs: list[Tensor] = []
        with ExitStack() as stack:
            layers, dense_layers = (dict(enumerate(table[name] for name in names)) for table in (modules, references))
            pause_at_layers(stack, layers, lambda position, layer, x, output: x, after=False)
            pause_at_layers(stack, dense_layers, lambda position, layer, x, output: (x, output), after=True)
            pairs = [
                tuple(
                    stack.enter_context(_paused(self.forward, m, batch, self.device))
                    for m in (self.reference, self.model)
                )
                for batch in batches
            ]
            for position, name in enumerate(names):
                mix = self.row_mixes.get(f"{name}.weight")
                problem = LayerProblem(name, modules[name], references[name], self.plan, total, mix)
                for i, (dense_pass, cut_pass) in enumerate(pairs):
                    before_cut = dense_pass.advance(position)
                    x = cut_pass.advance(position)
                    if before_cut is not None and x is not None:
                        problem.add_(i * world_size() + rank(), x, *before_cut)
                    dense_pass.payload = cut_pass.payload = None
                had_bias = isinstance(modules[name].bias, Tensor)
                results.append(problem.solve_())
                if results[-1].is_solved and not had_bias:
                    self.plan.biases[name] = len(modules[name].weight)  # type: ignore[arg-type]
                self.on_layer(position + 1, len(names))
            for dense_pass, _ in pairs[:1]:
                dense_pass.advance(math.inf)
                outputs = _floating_tensors(dense_pass.output)
        return results, outputs

    def _solvable_layers(self, trace: CallOrder) -> tuple[list[str], list[LayerRepair]]:
        """Return the layers behind the first cut in the order of their calls, and readers that cannot be solved."""
        modules, readers = modules_of(self.model), self.readers
        users = Counter(id(p) for m in modules.values() for p in m._parameters.values() if p is not None)
        names: list[str] = []
        unsolvable = [
            LayerRepair(name, reason="its code does not call it as a linear layer or convolution")
            for name in sorted(readers - set(trace.calls))
        ]
        for name, calls in trace.calls.items():
            layer = modules.get(name)
            is_start = name in readers or f"{name}.weight" in self.row_mixes
            if not (is_start or names) or not self._is_within(name):
                continue
            reason = ""
            if layer is None or not is_plain_layer(layer, grouped=True) or layer._parameters.get("weight") is None:
                reason = "its code does not call it as a linear layer or convolution"
            elif users[id(layer.weight)] > 1 or (layer.bias is not None and users[id(layer.bias)] > 1):
                reason = "it shares its weights with another layer"
            elif calls > 1:
                reason = f"it is called {calls} times in a forward pass"
            elif isinstance(layer, nn.Linear) and num_unknowns(layer) > MOST_INPUTS:
                reason = f"it has more than {MOST_INPUTS} inputs"
            if not reason:
                names.append(name)
            elif name in readers:
                unsolvable.append(LayerRepair(name, reason=reason))
        return names, unsolvable

    def _is_within(self, name: str) -> bool:
        return self.within is None or any(name == m or name.startswith(f"{m}.") for m in self.within)


@dataclass(frozen=True)
class CallOrder:
    """The linear layers and convolutions of a model in the order of their calls, with the number of calls."""

    calls: dict[str, int]
    largest_bytes: int  # of the input and the output of one of them, for one batch


def trace_calls(model: nn.Module, batches: Sequence[Any], forward: Forward) -> tuple[CallOrder, list[Tensor]]:
    """Run each process's first batch; return the order of calls in the first process, and this process's outputs."""
    calls: dict[str, int] = {}
    outputs: list[Tensor] = []
    largest = 0

    def record(name: str) -> Callable[..., None]:
        def hook(layer: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            nonlocal largest
            calls[name] = calls.get(name, 0) + 1
            tensors = tensors_in((args, kwargs, output))
            largest = max(largest, sum(t.numel() * t.element_size() for t in tensors))

        return hook

    with ExitStack() as stack:
        for name, layer in modules_of(model).items():
            if is_plain_layer(layer, grouped=True):
                stack.callback(layer.register_forward_hook(record(name), with_kwargs=True).remove)
        if batches:
            outputs = _floating_tensors(forward(model, batches[0]))
    return broadcast_object(CallOrder(calls, largest)), outputs


@contextmanager
def _paused(forward: Forward, model: nn.Module, batch: Any, device: torch.device) -> Iterator[PausedForward]:
    paused = PausedForward(lambda: forward(model, batch), device)
    try:
        yield paused
    finally:
        paused.stop()


def _floating_tensors(values: Any) -> list[Tensor]:
    return [t for t in tensors_in(values) if t.is_floating_point()]


def _are_equal(outputs: list[Tensor], expected: list[Tensor]) -> bool:
    """Return whether outputs are the same but for rounding; NaN equals NaN."""
    return len(outputs) == len(expected) and all(
        a.shape == b.shape and torch.allclose(a, b, rtol=1e-3, atol=1e-5, equal_nan=True)
        for a, b in zip(outputs, expected, strict=True)
        if b.numel()
    )


def _output_errors(reference: list[Tensor], before: list[Tensor], after: list[Tensor]) -> tuple[float | None, ...]:
    """Return the errors of the outputs before and after, and the agreement of the best classes before and after."""
    if not reference or any(a.shape != b.shape for a, b in zip(reference, after, strict=False)):
        return None, None, None, None
    expected = reference[0].double()
    variance = (expected - expected.mean(0)).square().sum().clamp_min(1e-30)
    errors = [float((out[0].double() - expected).square().sum() / variance) for out in (before, after)]
    if expected.ndim != 2 or expected.shape[1] < 2:
        return *errors, None, None
    agreements = [float((out[0].argmax(1) == expected.argmax(1)).double().mean()) for out in (before, after)]
    return *errors, *agreements
