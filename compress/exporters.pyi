# For type checkers, which follow the path of `pip install -e .` but do not run source_tree.py.
from exporters import *  # noqa: F403
from exporters import onnx as onnx
