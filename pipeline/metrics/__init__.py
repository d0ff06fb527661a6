"""What a run reports: metrics, the sinks they go to, and model FLOP utilization."""
