"""The ranks of a run: process group and collectives, heartbeats, timing."""
