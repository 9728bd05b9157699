"""Compact networks for where they run: `compress.exporters.onnx`."""

from . import onnx as onnx
