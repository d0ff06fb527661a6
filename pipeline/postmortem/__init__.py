"""What happened to a run that has ended, and how to continue it."""
