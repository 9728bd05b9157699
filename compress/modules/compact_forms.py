"""Registry of compact forms: subclasses of attention and norm modules that run at any width.

Most modules are traced as they are. Some are written for one width only: `reshape(B, N, C)` with the C of the input, or
`C // num_heads`. A compact form is a subclass with its own `forward` that computes the same function and takes every
width from its weights. It has the same parameters under the same names, and a module switches to it by changing its
`__class__` only, so it is saved, copied, pickled and exported as before. A form for your own class takes a dozen lines:

    @register_compact_form
    class MyCompactAttention(MyAttention):
        def forward(self, x):
            q, k, v = (split_heads(t, self.num_heads) for t in split_qkv(self.qkv(x), self.proj.in_features))
            return self.proj(join_heads(attend(q, k, v, self.scale)))

`split_qkv` splits a fused projection into parts that may have different widths, so that queries and keys can be cut
independently of values.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, TypeVar, overload

from torch import nn

from .traversal import modules_of

FormClass = TypeVar("FormClass", bound=type[nn.Module])


class FormUse(Enum):
    """When a module switches to its compact form."""

    ALWAYS = "always"  # before tracing
    SEPARATE_QKV = "separate_qkv"  # before tracing, only if queries and keys are cut independently of values
    WHEN_CUT = "when_cut"  # the original is traced; only a module that is cut switches


@dataclass(frozen=True)
class _CompactForm:
    """A registered form and its options."""

    form: type[nn.Module]
    use: FormUse
    fits: Callable[[Any], bool]
    prepare_: Callable[[Any], None]


_forms: dict[type[nn.Module], _CompactForm] = {}  # by dense class
_providers: dict[str, Callable[[], None]] = {}  # by package, until it is loaded


def _fits_always(module: Any) -> bool:
    return True


def _prepare_nothing_(module: Any) -> None:
    pass


@overload
def register_compact_form(form: FormClass) -> FormClass: ...


@overload
def register_compact_form(
    *,
    use: FormUse = ...,
    fits: Callable[[Any], bool] = ...,
    prepare_: Callable[[Any], None] = ...,
) -> Callable[[FormClass], FormClass]: ...


def register_compact_form(
    form: FormClass | None = None,
    *,
    use: FormUse = FormUse.ALWAYS,
    fits: Callable[[Any], bool] = _fits_always,
    prepare_: Callable[[Any], None] = _prepare_nothing_,
) -> FormClass | Callable[[FormClass], FormClass]:
    """Register a class as the compact form of its base class; use as a decorator, with or without options.

    Args:
        form: The class; it must derive from the dense module class and nothing else.
        use: When modules switch to this form.
        fits: Return whether the form can replace this module.
        prepare_: Store on the dense module what the form cannot compute from its weights, such as the scale.

    Raises:
        TypeError: The class does not derive directly from a module class.
    """
    if form is None:
        return partial(_register, use=use, fits=fits, prepare_=prepare_)
    return _register(form, use, fits, prepare_)


def _register(form: FormClass, use: FormUse, fits: Callable[[Any], bool], prepare_: Callable[[Any], None]) -> FormClass:
    base = form.__bases__[0] if len(form.__bases__) == 1 else nn.Module
    if not issubclass(base, nn.Module) or base is nn.Module:
        raise TypeError(f"compact form {form.__name__}: expected a subclass of the module class that it replaces")
    _forms[base] = _CompactForm(form, use, fits, prepare_)
    return form


def register_form_provider(package: str, load: Callable[[], None]) -> None:
    """Call `load` once, when a module class of `package` is first met, to register the compact forms of that package.

    A package is given by its dotted name, such as `timm` or `transformers.models.clip`.

    The package, which may be slow to import or not installed, is then imported only by those who use it.
    """
    _providers[package] = load


def compact_form_of(module: nn.Module) -> type[nn.Module] | None:
    """Return the compact form of a module, its own class if it is in compact form already, or None."""
    module_class = type(module)
    load_forms_for(module_class.__module__)
    entry = _forms.get(module_class)
    if entry is not None:
        return entry.form if entry.fits(module) else None
    return module_class if _entry_of_form(module_class) is not None else None


def load_forms_for(module_name: str) -> None:
    """Call the providers of the packages that a Python module belongs to."""
    for package in [p for p in _providers if module_name == p or module_name.startswith(f"{p}.")]:
        _providers[package]()
        del _providers[package]


def _entry_of_form(form: type[nn.Module]) -> _CompactForm | None:
    entry = _forms.get(form.__base__)  # type: ignore[arg-type]
    return entry if entry is not None and entry.form is form else None


def form_use(form: type[nn.Module]) -> FormUse:
    """Return when modules switch to this registered form."""
    entry = _entry_of_form(form)
    assert entry is not None
    return entry.use


def use_compact_form_(module: nn.Module) -> None:
    """Switch a module to its compact form, which computes the same function.

    Raises:
        TypeError: The module has no compact form.
    """
    form = compact_form_of(module)
    if form is None:
        raise TypeError(f"{type(module).__name__} has no compact form")
    if type(module) is not form:
        _forms[type(module)].prepare_(module)
        module.__class__ = form


def use_compact_forms_(model: nn.Module, separate_qkv: bool = False) -> nn.Module:
    """Switch every module that is traced in its compact form to that form; the function stays the same."""
    uses = {FormUse.ALWAYS, FormUse.SEPARATE_QKV} if separate_qkv else {FormUse.ALWAYS}
    for module in modules_of(model).values():
        form = compact_form_of(module)
        if form is not None and form_use(form) in uses:
            use_compact_form_(module)
    return model


def dense_class_name(form: type[nn.Module]) -> str:
    """Return the full name of the class that a form replaces, as plans store it."""
    return f"{form.__bases__[0].__module__}.{form.__bases__[0].__qualname__}"
