"""The programs: one module per job. See `neuclip --help`."""
