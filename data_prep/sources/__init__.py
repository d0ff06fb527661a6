"""Reading URL tables and selecting their rows."""
