"""Telemetry of a run: metrics, the sinks they are written to, and model FLOPs utilization."""
