"""Calls of scaled dot product attention in a forward pass, and the rows of weights that write its queries and keys.

A row of a weight writes a dimension of a head if the tensors that the attention gets are, number by number, outputs of
the linear layer: nothing but reshaping lies between. So rotary positions and norms of queries are told apart, and a
fused projection, separate ones and `nn.MultiheadAttention` need no knowledge of their code.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

PROBED_TOKENS = 8


@dataclass(frozen=True)
class HeadRows:
    """Rows of a weight (and its bias) that write the queries, or the keys, of every head."""

    weight: str
    bias: str | None
    first: tuple[int, ...]  # row of each head; the others follow it
    width: int


@dataclass(frozen=True)
class LinearCall:
    """A call of a linear layer: the parameters, the first row that it uses, and the output."""

    weight: str
    bias: str | None
    first_row: int
    output: Tensor


@dataclass(frozen=True)
class AttentionCall:
    """Queries and keys of an attention, of shape (images, heads, tokens, width), and the linear layers before it."""

    queries: Tensor
    keys: Tensor
    linear_calls: tuple[LinearCall, ...]

    def rows(self) -> tuple[HeadRows, HeadRows] | None:
        """Return the rows that write queries and keys; None if there are none, or the heads differ in number."""
        if self.queries.ndim != 4 or self.keys.ndim != 4 or self.queries.shape[1::2] != self.keys.shape[1::2]:
            return None
        head_rows = [_rows_of(x, self.linear_calls) for x in (self.queries, self.keys)]
        return None if head_rows[0] is None or head_rows[1] is None else (head_rows[0], head_rows[1])


class AttentionCalls(TorchFunctionMode):
    """Calls a function at each attention while a model runs.

    Args:
        parameters: weights and biases of the linear layers to record, by name.
        on_attention: gets the number of the call in this pass, and the call.
    """

    def __init__(self, parameters: Mapping[str, Tensor], on_attention: Callable[[int, AttentionCall], None]) -> None:
        super().__init__()
        self._parameters, self._on_attention = parameters, on_attention
        self._calls: list[LinearCall] = []
        self.count = 0
        self.uses: Counter[tuple[str, int]] = Counter()  # calls of a weight, by its name and first row

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if func is F.linear:
            self._record(out, *(args[i] if i < len(args) else kwargs.get(n) for i, n in ((1, "weight"), (2, "bias"))))
        elif func is F.scaled_dot_product_attention:
            q, k = (args[i] if i < len(args) else kwargs[name] for i, name in enumerate(("query", "key")))
            self._on_attention(self.count, AttentionCall(q, k, tuple(self._calls)))
            self.count += 1
            self._calls.clear()
        return out

    def _record(self, output: Tensor, weight: Tensor, bias: Tensor | None) -> None:
        if weight.ndim != 2 or (place := self._place_of(weight)) is None:
            return
        name, first_row = place
        self.uses[place] += 1
        bias_place = None if bias is None else self._place_of(bias)
        if bias is not None and (bias_place is None or bias_place[1] != first_row):
            return  # the bias is computed
        self._calls.append(LinearCall(name, bias_place[0] if bias_place else None, first_row, output))

    def _place_of(self, tensor: Tensor) -> tuple[str, int] | None:
        """Return the parameter of which a tensor is consecutive rows, and the first of them."""
        for name, p in self._parameters.items():
            offset, row = tensor.data_ptr() - p.data_ptr(), p.stride(0) * p.element_size()
            same = tensor.stride() == p.stride() and tensor.shape[1:] == p.shape[1:] and tensor.dtype == p.dtype
            if same and 0 <= offset < p.nbytes and offset % row == 0 and len(tensor) <= len(p) - offset // row:
                return name, offset // row
        return None


def _rows_of(x: Tensor, calls: tuple[LinearCall, ...]) -> HeadRows | None:
    """Return the rows that write a tensor of queries or keys; None if no layer does, or it is ambiguous."""
    width, head_rows = x.shape[-1], list[HeadRows]()
    for call in calls:
        y = call.output
        if y.ndim != 3 or y.shape[-1] < width or y.dtype != x.dtype:
            continue
        for tokens in (y, y.transpose(0, 1)):  # nn.MultiheadAttention may have the tokens first
            if tokens.shape[:2] != (x.shape[0], x.shape[2]):
                continue
            windows = tokens[0, :PROBED_TOKENS].unfold(-1, width, 1)  # (tokens, first rows, width)
            heads = x[0, :, :PROBED_TOKENS]
            first = [(windows == head[:, None]).all(2).all(0).nonzero().flatten().tolist() for head in heads]
            if any(len(rows) != 1 for rows in first):
                continue
            starts = [rows[0] for rows in first]
            index = torch.tensor(starts, device=x.device)[:, None] + torch.arange(width, device=x.device)
            if torch.equal(tokens[..., index].transpose(1, 2), x):
                firsts = tuple(call.first_row + start for start in starts)
                head_rows.append(HeadRows(call.weight, call.bias, firsts, width))
                break
    return head_rows[0] if len(head_rows) == 1 else None
