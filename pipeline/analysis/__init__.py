"""Measurements on finished checkpoints."""
