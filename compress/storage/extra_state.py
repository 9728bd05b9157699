"""Extra state of modules (`get_extra_state`) as tensors, so that it is saved without pickle.

A state of numbers, text, lists, tuples, dicts and tensors is JSON, as a tensor of bytes under the state's own key, and
its tensors under `KEY/0`, `KEY/1` and so on. Lists in the JSON are pairs of a type and its content.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from compress.formatting import describe_value

EXTRA_STATE = "_extra_state"  # torch's name in state dicts


def is_extra_state(name: str) -> bool:
    """Return whether a name in a state dict, or of a tensor of this file, belongs to extra state."""
    return name.partition("/")[0].rpartition(".")[2] == EXTRA_STATE


def extra_states(module: nn.Module) -> dict[str, Any]:
    """Return the extra states of a module and its submodules, by their names in the state dict."""
    return {name: value for name, value in module.state_dict(keep_vars=True).items() if is_extra_state(name)}


def set_extra_states_(module: nn.Module, states: Mapping[str, Any]) -> None:
    """Set the extra states of a module and its submodules; leave those without `set_extra_state` alone."""
    for name, state in states.items():
        owner = module.get_submodule(name.rpartition(".")[0])
        if _can_be_set(owner):
            owner.set_extra_state(state)


def extra_state_problems(module: nn.Module) -> list[str]:
    """Return why extra states cannot be saved or restored, one line for each."""
    problems = []
    for name, state in extra_states(module).items():
        path = name.rpartition(".")[0]
        owner = module.get_submodule(path)
        where = f"model{'.' * bool(path)}{path} ({type(owner).__name__})"
        if not _can_be_set(owner):
            problems.append(f"{where}: has get_extra_state and no set_extra_state to restore it with; write both")
        try:
            encode_extra_states({name: state})
        except TypeError as error:
            problems.append(
                f"{where}: get_extra_state: expected numbers, text, tensors, and lists, tuples and dicts of these, "
                f"which are saved without pickle; got {error}. Return these, and build the rest in set_extra_state"
            )
    return problems


def encode_extra_states(states: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return extra states as tensors.

    >>> encoded = encode_extra_states({"a._extra_state": {"steps": 3, "sums": [torch.ones(2)]}})
    >>> sorted(encoded)
    ['a._extra_state', 'a._extra_state/0']
    >>> decode_extra_states(encoded)
    {'a._extra_state': {'steps': 3, 'sums': [tensor([1., 1.])]}}

    Raises:
        TypeError: a state holds a value of another type.
    """
    encoded: dict[str, Tensor] = {}
    for name, state in states.items():
        tensors: list[Tensor] = []
        text = json.dumps(_to_json(state, tensors))
        encoded[name] = torch.tensor(list(text.encode()), dtype=torch.uint8)
        encoded |= {f"{name}/{i}": tensor for i, tensor in enumerate(tensors)}
    return encoded


def decode_extra_states(tensors: Mapping[str, Tensor], device: torch.device | None = None) -> dict[str, Any]:
    """Return the extra states among tensors, by name.

    Args:
        device: of tensors that were not on the CPU; default: the CPU.

    Raises:
        ValueError: they are not what `encode_extra_states` returns.
    """
    states = {}
    for name, tensor in tensors.items():
        if is_extra_state(name) and "/" not in name:
            try:
                parts = _Parts(name, tensors, device or torch.device("cpu"))
                states[name] = _from_json(json.loads(bytes(tensor.tolist()).decode()), parts)
            except (KeyError, TypeError, ValueError, RecursionError) as error:
                raise ValueError(f"{name}: not an extra state ({error!r})") from error
    return states


def _can_be_set(module: nn.Module) -> bool:
    return type(module).set_extra_state is not nn.Module.set_extra_state


def _to_json(value: Any, tensors: list[Tensor]) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Tensor) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value.detach())
        return ["tensor", [len(tensors) - 1, value.device.type != "cpu"]]
    if type(value) in (list, tuple):
        return [type(value).__name__, [_to_json(item, tensors) for item in value]]
    if isinstance(value, dict):
        if bad := [key for key in value if key is not None and not isinstance(key, (bool, int, float, str))]:
            raise TypeError(f"a dict with the key {describe_value(bad[0])}")
        return ["dict", [[key, _to_json(item, tensors)] for key, item in value.items()]]
    raise TypeError(describe_value(value))


class _Parts(NamedTuple):
    """The tensors that a state is decoded from."""

    name: str
    tensors: Mapping[str, Tensor]
    device: torch.device


def _from_json(value: Any, parts: _Parts) -> Any:
    if not isinstance(value, list):
        return value
    kind, content = value
    if kind == "tensor":
        index, moves = content
        tensor = parts.tensors[f"{parts.name}/{int(index)}"].clone()
        return tensor.to(parts.device) if moves else tensor
    if kind == "dict":
        return {key: _from_json(item, parts) for key, item in content}
    items = [_from_json(item, parts) for item in content]
    return tuple(items) if kind == "tuple" else items
