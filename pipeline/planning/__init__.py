"""What is known before a run: memory, time, and whether this node can train."""
