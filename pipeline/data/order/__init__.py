"""The order of samples: which sample is in which row of which batch, as a pure function."""
