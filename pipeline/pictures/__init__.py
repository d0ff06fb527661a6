"""Pictures that somebody else made: the only code that opens them."""
