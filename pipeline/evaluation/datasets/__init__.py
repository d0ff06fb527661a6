"""Which tasks there are, and their data in each supported layout.

All readers raise `TaskError` for data that is missing, partial, damaged or inconsistent; the message names the file, or
the row, and what to do.
"""
