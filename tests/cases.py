"""The table of small networks that every contract runs on."""

import networks_hostile
import networks_plain
import networks_special
from case import CASES, Case, Net

__all__ = ["CASES", "Case", "Net", "networks_hostile", "networks_plain", "networks_special"]
