"""Files of a run: atomic writes, the lock of a working directory, checkpoints, hashes, JSON and random state.

Nothing here knows about pruning.
"""

from .checkpoint import (
    CheckpointStore,
    TrainingState,
    load_tensors_,
    load_training_tensors_,
    state_tensors,
    tensors_under,
    training_tensors,
)
from .directories import atomic_directory, find_saved
from .extra_state import (
    decode_extra_states,
    encode_extra_states,
    extra_state_problems,
    extra_states,
    is_extra_state,
    set_extra_states_,
)
from .files import (
    EXPORT_FILES,
    PRESERVED,
    TRACKER_FOLDER,
    YOLO_FILE,
    check_writable,
    is_temporary_file,
    remove_temporary_files,
    write_atomic,
)
from .hashes import hash_tensors
from .json_file import read_json
from .lock import LOCK_FILE, lock_directory
from .random_state import RandomState, get_random_state, isolated_random_state, seed_all, set_random_state

__all__ = [
    "EXPORT_FILES",
    "LOCK_FILE",
    "PRESERVED",
    "TRACKER_FOLDER",
    "YOLO_FILE",
    "CheckpointStore",
    "RandomState",
    "TrainingState",
    "atomic_directory",
    "check_writable",
    "decode_extra_states",
    "encode_extra_states",
    "extra_state_problems",
    "extra_states",
    "find_saved",
    "get_random_state",
    "hash_tensors",
    "is_extra_state",
    "is_temporary_file",
    "isolated_random_state",
    "load_tensors_",
    "load_training_tensors_",
    "lock_directory",
    "read_json",
    "remove_temporary_files",
    "seed_all",
    "set_extra_states_",
    "set_random_state",
    "state_tensors",
    "tensors_under",
    "training_tensors",
    "write_atomic",
]
