"""Forward, backward and optimizer step of the towers: the `Engine` protocol, DeepSpeed, optimizers, schedule."""
