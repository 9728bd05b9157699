"""Errors raised while a model is exported or a file is compared with it."""


class ExportError(ValueError):
    """The model cannot be exported with the given options; the message says where and what to do."""


class ParityError(ExportError):
    """The file computes something different from the model."""
