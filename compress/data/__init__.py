"""Training and validation data: named loaders, reproducible iteration, halves for bilevel searches, sharding.

Batches are opaque here; a task knows what is in them.
"""

from .accumulation import accumulate_batches
from .batches import (
    BatchPosition,
    count_steps,
    derive_seed,
    iterate_batches,
    loader_problems,
    num_batches,
    peek_first_batch,
    reproducible_reading,
    resume_limits,
    seed_loader,
)
from .image_files import calibration_loader
from .micro_batches import AccumulatedBatch, batch_size_of, batches_of_step, slice_batch, split_batch
from .named_loaders import DATA_SOURCES, TrainValLoaders, is_factory, loaders, test_loader
from .sharding import shard_loader, shards_itself
from .shuffling import shuffled_loader
from .split_halves import split_into_halves

__all__ = [
    "DATA_SOURCES",
    "AccumulatedBatch",
    "BatchPosition",
    "TrainValLoaders",
    "accumulate_batches",
    "batch_size_of",
    "batches_of_step",
    "calibration_loader",
    "count_steps",
    "derive_seed",
    "is_factory",
    "iterate_batches",
    "loader_problems",
    "loaders",
    "num_batches",
    "peek_first_batch",
    "reproducible_reading",
    "resume_limits",
    "seed_loader",
    "shard_loader",
    "shards_itself",
    "shuffled_loader",
    "slice_batch",
    "split_batch",
    "split_into_halves",
    "test_loader",
]
