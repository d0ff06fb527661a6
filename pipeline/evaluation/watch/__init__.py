"""Evaluating checkpoints as they appear, with any number of watchers."""
