"""MMDetection: detectors from configs, on mmengine's Runner. The only part of the library that imports mmdet."""

from .ops import install

install()

from .config import build, read  # noqa: E402
from .detection import Detection, task  # noqa: E402
from .distill import channelwise  # noqa: E402
from .ext import MissingOp  # noqa: E402
from .forms import WindowMSA  # noqa: E402
from .loading import entry  # noqa: E402
from .safe import allow  # noqa: E402

allow()

__all__ = ["Detection", "MissingOp", "WindowMSA", "build", "channelwise", "entry", "read", "task"]
