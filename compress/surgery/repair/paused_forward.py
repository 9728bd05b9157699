"""Forward passes that stop at layers: many batches wait at the same layer until its weights are solved.

Each pass runs in a thread of its own, and only one thread runs at a time: the pass that was resumed, until it stops at
its next layer or ends. So all batches go through the network once, layer by layer, and nothing depends on timing.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import Any

import torch
from torch import nn

Payload = Any
_running = threading.local()  # the pass that this thread runs


class PassStopped(BaseException):
    """Ends the thread of a pass that is no longer needed; not an Exception, which the model's code could catch."""


class PausedForward:
    """A forward pass of one batch that can be resumed from layer to layer.

    Attributes:
        position: the layer at which the pass waits; -1 before the start, infinity after the end.
        payload: what the hook of that layer returned.
        output: what the pass returned at its end.
    """

    def __init__(self, run: Callable[[], Any], device: torch.device) -> None:
        self.position: float = -1
        self.payload: Payload = None
        self.output: Any = None
        self._run, self._device = run, device
        self._error: BaseException | None = None
        self._is_stopped = False
        self._resumed, self._paused = threading.Semaphore(0), threading.Semaphore(0)
        self._thread = threading.Thread(target=self._main, daemon=True)
        self._thread.start()

    def advance(self, position: float) -> Payload:
        """Run until the layer at `position`; return its payload, or None if the pass does not stop there."""
        while self.position < position:
            self.payload = None
            self._resumed.release()
            self._paused.acquire()
            if self._error is not None:
                raise self._error
        return self.payload if self.position == position else None

    def stop(self) -> None:
        """End the thread; the rest of the forward pass is not run."""
        self._is_stopped = True
        while self._thread.is_alive():
            self._resumed.release()
            self._thread.join(0.1)

    def _main(self) -> None:
        _running.current = self
        on_device = torch.cuda.device(self._device) if self._device.type == "cuda" else nullcontext()
        self._resumed.acquire()
        try:
            with torch.no_grad(), on_device:  # both are settings of the thread
                if not self._is_stopped:
                    self.output = self._run()
        except PassStopped:
            pass
        except BaseException as error:
            self._error = error
        self.position = math.inf
        self._paused.release()

    def pause(self, position: int, payload: Payload) -> None:
        """Wait at a layer; called by its hook, in the thread of the pass."""
        self.position, self.payload = position, payload
        self._paused.release()
        self._resumed.acquire()
        if self._is_stopped:
            raise PassStopped


LayerHook = Callable[[int, nn.Module, torch.Tensor, torch.Tensor | None], Payload]


def pause_at_layers(stack: ExitStack, layers: Mapping[int, nn.Module], payload_of: LayerHook, *, after: bool) -> None:
    """Stop the passes at these layers, by position, before or after they run; the stack removes the hooks.

    Args:
        payload_of: gets the position, the layer, its input and, if `after`, its output.
    """
    for position, layer in layers.items():

        def before_hook(layer: nn.Module, args: Any, kwargs: Any, position: int = position) -> None:
            current: PausedForward | None = getattr(_running, "current", None)
            if current is not None:
                current.pause(position, payload_of(position, layer, _input_of(args, kwargs), None))

        def after_hook(layer: nn.Module, args: Any, kwargs: Any, output: Any, position: int = position) -> None:
            current: PausedForward | None = getattr(_running, "current", None)
            if current is not None:
                current.pause(position, payload_of(position, layer, _input_of(args, kwargs), output))

        if after:
            handle = layer.register_forward_hook(after_hook, with_kwargs=True, prepend=True)
        else:
            handle = layer.register_forward_pre_hook(before_hook, with_kwargs=True)
        stack.callback(handle.remove)


def _input_of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> torch.Tensor:
    value: torch.Tensor = args[0] if args else kwargs["input"]
    return value
