"""What a run reports: metrics and their sinks, model FLOP utilisation."""
