"""Attention whose code takes the width of queries, keys and values for that of its input: forms that do not.

Most attention is followed like any other code (tracing/contractions.py). Some is written for one width only:
`reshape(B, N, C)` with the C of its input, or `C // num_heads`. For such a class there is a compact form here, a
subclass with a forward of its own that computes the same and takes every width from its weights. It has the same
parameters under the same names, and a module becomes one by its `__class__` alone: it saves, copies, pickles and
exports as before. A compact form of your own takes a dozen lines:

    @compact
    class Mine(Attention):                          # the class as it is in your code
        def forward(self, x):
            q, k, v = (split_heads(t, self.num_heads) for t in apart(self.qkv(x), self.proj.in_features))
            return self.proj(join_heads(attend(q, k, v, self.scale)))

`apart` takes a fused projection to pieces that need not be of one width, so that queries and keys may be cut in one way
and values in another. A form may have `fits(module)` (whether it can stand for this one), `note_(module)` (keeps what
the dense module knows and the compact one would not, such as the scale), and `when`: "apart" if the original code will
do unless queries and keys are scored apart from values, "cut" if the original is to be followed and only a module that
was cut takes the form.
"""

from __future__ import annotations

import importlib
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .walk import modules_of

Class = TypeVar("Class", bound=type[nn.Module])
_FORMS: dict[type[nn.Module], type[nn.Module]] = {}
_ELSEWHERE = {"mmdet": "compress.mmdet.forms"}  # package -> what registers its forms, imported when it is met


def compact(form: Class) -> Class:
    """Make a class known as the compact form of the one it derives from.

    Raises:
        TypeError: it does not derive from a module directly.
    """
    base = form.__bases__[0] if len(form.__bases__) == 1 else nn.Module
    if not issubclass(base, nn.Module) or base is nn.Module:
        raise TypeError(f"compact form {form.__name__}: expected a subclass of the attention it stands for")
    _FORMS[base] = form
    return form


def form_of(module: nn.Module) -> type[nn.Module] | None:
    """The compact form of a module, which it may have already."""
    kind = type(module)
    if elsewhere := _ELSEWHERE.get(kind.__module__.partition(".")[0]):
        importlib.import_module(elsewhere)
    form = _FORMS.get(kind)
    if form is None and _FORMS.get(kind.__base__) is kind:  # type: ignore[arg-type]
        return kind
    fits = getattr(form, "fits", None)
    return form if form is not None and (fits is None or fits(module)) else None


def when(form: type[nn.Module]) -> str:
    """When modules take this form: always, apart or cut."""
    return str(getattr(form, "when", "always"))


def take_(module: nn.Module) -> None:
    """Give a module its compact form; the function is the same.

    Raises:
        TypeError: it has none.
    """
    form = form_of(module)
    if form is None:
        raise TypeError(f"{type(module).__name__} has no compact form")
    if type(module) is not form:
        note = getattr(form, "note_", None)
        if note is not None:
            note(module)
        module.__class__ = form


def name_of(form: type[nn.Module]) -> str:
    """As a plan has it."""
    return f"{form.__bases__[0].__module__}.{form.__bases__[0].__qualname__}"


def make_compact_(model: nn.Module, apart: bool = False) -> nn.Module:
    """Give every module that is to be followed in its compact form that form; the function is the same."""
    for module in modules_of(model).values():
        form = form_of(module)
        if form is not None and when(form) in ("always", "apart" if apart else "always"):
            take_(module)
    return model


def apart(x: Tensor, values: int, dim: int = -1) -> tuple[Tensor, ...]:
    """A fused projection's queries, keys and values, of which the last are so wide."""
    keys = (x.shape[dim] - values) // 2
    return torch.split_with_sizes(x, [keys, keys, values], dim)


def split_heads(x: Tensor, heads: int) -> Tensor:
    """(batch, tokens, width) -> (batch, heads, tokens, width of a head)."""
    return x.view(*x.shape[:-1], heads, -1).transpose(1, 2)


def join_heads(x: Tensor) -> Tensor:
    """(batch, heads, tokens, width of a head) -> (batch, tokens, width)."""
    return x.transpose(1, 2).flatten(2)


def attend(q: Tensor, k: Tensor, v: Tensor, scale: float, bias: Tensor | None = None, dropout: float = 0.0) -> Tensor:
    """softmax(scale q k^T + bias) v; the scale is that of the dense width."""
    return F.scaled_dot_product_attention(q, k, v, attn_mask=bias, dropout_p=dropout, scale=scale)


def weigh(scores: Tensor, v: Tensor, dropout: float = 0.0) -> Tensor:
    """softmax(scores) v."""
    return F.dropout(scores.softmax(-1), dropout) @ v


def cosine(q: Tensor, k: Tensor, logit_scale: Tensor) -> Tensor:
    """Scores of Swin v2: the cosine of queries and keys, times a factor for each head, a hundred at the most."""
    factor = logit_scale.clamp(max=float(torch.log(torch.tensor(100.0)))).exp()
    return F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-2, -1) * factor


def without_keys(bias: Tensor, values: int) -> Tensor:
    """A bias of queries, keys and values, with that of the keys at zero; the last are so wide."""
    q, k, v = apart(bias, values)
    return torch.cat([q, torch.zeros_like(k), v])


@compact
class MultiheadAttention(nn.MultiheadAttention):
    """torch's own, without the fast path that transformer layers take around it."""

    _qkv_same_embed_dim = property(lambda self: False)
    scale: float

    @staticmethod
    def note_(module: Any) -> None:
        module.scale = (module.embed_dim // module.num_heads) ** -0.5

    @staticmethod
    def fits(module: Any) -> bool:
        plain = module.bias_k is None and module.bias_v is None and not module.add_zero_attn
        return plain and bool(module._qkv_same_embed_dim)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        batched, first = query.dim() == 3, self.batch_first
        inputs = [query, key, value]
        if not batched:
            inputs = [t.unsqueeze(0) for t in inputs]
        elif not first:
            inputs = [t.transpose(0, 1) for t in inputs]
        values = self.out_proj.in_features
        rows = apart(self.in_proj_weight, values, 0)
        shifts = apart(self.in_proj_bias, values) if self.in_proj_bias is not None else (None, None, None)
        q, k, v = (split_heads(F.linear(*part), self.num_heads) for part in zip(inputs, rows, shifts, strict=True))
        bias = self._bias(q, k, key_padding_mask, attn_mask, is_causal)
        scale, dropout = self.scale, self.dropout if self.training else 0.0
        weights: Tensor | None = None
        if need_weights:
            scores = scale * q @ k.transpose(-2, -1)
            weights = F.dropout((scores if bias is None else scores + bias).softmax(-1), dropout)
            out = weights @ v
            weights = weights.mean(1) if average_attn_weights else weights
        else:
            out = attend(q, k, v, scale, bias, dropout)
        joined = self.out_proj(join_heads(out))
        if not batched:
            return joined.squeeze(0), None if weights is None else weights.squeeze(0)
        return (joined if first else joined.transpose(0, 1)), weights

    def _bias(self, q: Tensor, k: Tensor, padding: Tensor | None, mask: Tensor | None, causal: bool) -> Tensor | None:
        """Both masks as numbers to be added."""
        if mask is None and causal:
            raise RuntimeError("is_causal needs attn_mask, as in torch.nn.MultiheadAttention")
        found = None
        if mask is not None:
            found = _numbers(mask, q.dtype)
            if found.dim() == 3:
                found = found.view(len(q), self.num_heads, *found.shape[1:])
        if padding is not None:
            ignored = _numbers(padding, q.dtype).view(len(q), 1, 1, k.shape[2])
            found = ignored if found is None else found + ignored
        return found


def _numbers(mask: Tensor, dtype: torch.dtype) -> Tensor:
    if mask.dtype != torch.bool:
        return mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, float("-inf"))
