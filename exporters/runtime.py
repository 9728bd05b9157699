"""A file in onnxruntime, run like the model that it came from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .call import ExportError
from .extra import need_onnx

TYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


class Runner(nn.Module):
    """An ONNX file that is called with tensors, in whatever form, and gives a tensor or a tuple of them.

    It has no parameters and is in nobody's graph, but it can be evaluated and timed like any network.

    Raises:
        ExportError: onnxruntime does not load it.
    """

    def __init__(self, source: bytes | str | Path, threads: int | None = None) -> None:
        super().__init__()
        need_onnx("onnxruntime")
        import onnxruntime as ort

        options = ort.SessionOptions()
        self.threads = threads or torch.get_num_threads()
        options.intra_op_num_threads, options.inter_op_num_threads = self.threads, 1
        options.log_severity_level = 3
        options.add_session_config_entry(
            "session.force_spinning_stop", "1"
        )  # idle threads would slow down what runs next
        try:
            given = source if isinstance(source, bytes) else str(source)
            self.session = ort.InferenceSession(given, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # the library has a dozen kinds of its own
            where = "the exported graph" if isinstance(source, bytes) else str(source)
            raise ExportError(f"{where}: onnxruntime {ort.__version__} does not load it: {error}") from error
        self.names = [i.name for i in self.session.get_inputs()]
        self.shapes = {i.name: list(i.shape) for i in self.session.get_inputs()}
        self.dtypes = {i.name: TYPES.get(i.type, torch.float32) for i in self.session.get_inputs()}
        self.outputs = [o.name for o in self.session.get_outputs()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        leaves = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        made = self.run(leaves)
        return made[0] if len(made) == 1 else tuple(made)

    def run(self, leaves: list[Tensor]) -> list[Tensor]:
        """
        Raises:
            ExportError: the inputs are not those of the file, or onnxruntime fails on them.
        """
        if len(leaves) != len(self.names):
            raise ExportError(
                f"expected {len(self.names)} tensors, {', '.join(self.names)}; got {len(leaves)}. The file has other "
                "inputs than what it is called with"
            )
        feed = {n: t.detach().cpu().contiguous().numpy() for n, t in zip(self.names, leaves, strict=True)}
        try:
            made = self.session.run(None, feed)
        except Exception as error:
            shapes = ", ".join(f"{name}{list(array.shape)}" for name, array in feed.items())
            raise ExportError(f"onnxruntime fails on {shapes}: {error}") from error
        return [torch.from_numpy(array).to(leaves[0].device) for array in made]

    def __deepcopy__(self, memo: Any) -> Runner:
        return self  # a session has no state that a run would change
