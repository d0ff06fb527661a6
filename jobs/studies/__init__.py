"""Studies: declared sets of runs (methods x settings x seeds) whose results are rendered as tables and figures."""
