"""One thread: the networks of the tests are small, and threads would wait for each other longer than they work."""

import torch

torch.set_num_threads(1)
