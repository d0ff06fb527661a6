"""Evaluating checkpoints: models, features, results."""
