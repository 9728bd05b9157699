"""Training on several processes: the reduction of gradients, and students that are whole or sharded."""
