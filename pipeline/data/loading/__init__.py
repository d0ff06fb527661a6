"""From shards to batches: reading, decoding, loading processes, resuming."""
