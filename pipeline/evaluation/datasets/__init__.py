"""Which tasks there are, and their data in each supported layout."""
