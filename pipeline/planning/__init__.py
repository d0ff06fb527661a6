"""Before a run: estimates of memory and time, and checks whether this node can train."""
