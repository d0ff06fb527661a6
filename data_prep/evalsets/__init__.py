"""The evaluation sets: where they are published, and copies of them that are verified."""
