"""The evaluation sets: where they are published, and verified copies of them."""
