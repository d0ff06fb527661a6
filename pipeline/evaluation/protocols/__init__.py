"""How a task is scored: classification, retrieval, association."""
