"""Finished models for others: open_clip folders, model cards, compiled programs."""
