"""Which sample fills which row of which batch, as a pure function."""
