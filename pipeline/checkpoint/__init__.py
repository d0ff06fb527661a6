"""Checkpoints: written atomically, verified by hash, independent of ZeRO stage and world size."""
