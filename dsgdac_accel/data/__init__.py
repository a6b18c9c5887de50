"""Data of each worker: shards, order, equal steps, parts of a batch, and the position in a pass."""
