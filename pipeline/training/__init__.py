"""One training run: recipe, run folder, step, loop."""
