"""Networks of cells: the search spaces of DARTS and NATS-Bench, their genotypes, and published cells.

`darts_network` and `nats_network` return a network with a choice on every edge, or with a genotype the plain network.
"""

from .darts_space import DartsNetwork, darts_network
from .drawing import draw_cell
from .genotype import Cell, Genotype
from .nats_space import NatsNetwork, digits_network, nats_genotypes, nats_network
from .published import AMOEBANET_A, DARTS_V1, DARTS_V2, ENAS, NASNET_A

__all__ = [
    "AMOEBANET_A",
    "DARTS_V1",
    "DARTS_V2",
    "ENAS",
    "NASNET_A",
    "Cell",
    "DartsNetwork",
    "Genotype",
    "NatsNetwork",
    "darts_network",
    "digits_network",
    "draw_cell",
    "nats_genotypes",
    "nats_network",
]
