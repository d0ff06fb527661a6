"""Before a run: estimates of memory and time, and whether this node can train; after it: how it ended."""
