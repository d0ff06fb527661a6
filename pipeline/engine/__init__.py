"""Forward, backward and optimizer step of the towers, under DeepSpeed."""
