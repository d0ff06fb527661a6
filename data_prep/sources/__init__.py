"""Where URL tables come from and which rows are taken."""
