"""Run an ONNX file in onnxruntime as if it were a module."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from .errors import ExportError
from .requirements import need_onnx

TORCH_DTYPES = {
    "tensor(float)": torch.float32,
    "tensor(float16)": torch.float16,
    "tensor(double)": torch.float64,
    "tensor(int64)": torch.int64,
    "tensor(int32)": torch.int32,
    "tensor(uint8)": torch.uint8,
    "tensor(bool)": torch.bool,
}


class OnnxRunner(nn.Module):
    """An ONNX file or serialized graph that is called like the model it was exported from.

    It returns one tensor or a tuple of tensors. It has no parameters and no gradients, but can be evaluated and timed
    like any network.

    Args:
        source: the serialized graph, or the path of a file.
        threads: for onnxruntime; default: as many as torch uses.

    Raises:
        MissingExtra: onnxruntime is not installed.
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
        # Idle threads that spin would slow down whatever runs next.
        options.add_session_config_entry("session.force_spinning_stop", "1")
        try:
            bytes_or_path = source if isinstance(source, bytes) else str(source)
            self.session = ort.InferenceSession(bytes_or_path, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime has about a dozen exception types without a common base
            name = "the exported graph" if isinstance(source, bytes) else str(source)
            raise ExportError(f"{name}: onnxruntime {ort.__version__} does not load it: {error}") from error
        self.input_names = [i.name for i in self.session.get_inputs()]
        self.input_shapes = {i.name: list(i.shape) for i in self.session.get_inputs()}
        self.input_dtypes = {i.name: TORCH_DTYPES.get(i.type, torch.float32) for i in self.session.get_inputs()}
        self.output_names = [o.name for o in self.session.get_outputs()]

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        tensors = [t for t in pytree.tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        outputs = self.run(tensors)
        return outputs[0] if len(outputs) == 1 else tuple(outputs)

    def run(self, tensors: list[Tensor]) -> list[Tensor]:
        """Run the file on its inputs, in order; return all outputs.

        Raises:
            ExportError: the number of inputs differs from the file's, or onnxruntime fails on them.
        """
        if len(tensors) != len(self.input_names):
            raise ExportError(
                f"the file expects {len(self.input_names)} tensors, {', '.join(self.input_names)}; got {len(tensors)}"
            )
        feed = {n: t.detach().cpu().contiguous().numpy() for n, t in zip(self.input_names, tensors, strict=True)}
        try:
            outputs = self.session.run(None, feed)
        except Exception as error:
            shapes = ", ".join(f"{name}{list(array.shape)}" for name, array in feed.items())
            raise ExportError(f"onnxruntime fails on {shapes}: {error}") from error
        return [torch.from_numpy(array).to(tensors[0].device) for array in outputs]

    def __deepcopy__(self, memo: Any) -> OnnxRunner:
        return self  # running a session does not change it
