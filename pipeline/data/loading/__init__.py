"""From shards to batches: reading, decoding, worker processes, resuming."""
