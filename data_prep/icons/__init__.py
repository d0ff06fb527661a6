"""Icons with their names as captions, from the npm package @iconify/json: shards and a held-out suite."""
