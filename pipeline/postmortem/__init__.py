"""What happened to a run that has ended: the evidence in its folder, and what follows from it."""
