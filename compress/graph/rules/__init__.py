"""Rules that say what each ATen operator does to the dimensions of its tensors, one file per family of operators."""

from . import contractions, elementwise, layout, normalization  # noqa: F401  (they register their rules)
