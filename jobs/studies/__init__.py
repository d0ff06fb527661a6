"""Studies: declared sets of runs (methods x settings x seeds) whose results are rendered as tables and figures.

NAME.yaml     the declaration of a study (read by `declare.py`)
costs.py      what a run cost: CPU seconds and FLOPs
unit.py       one run with its measurements, in its own process
schedule.py   runs all units of a study on the available devices
outcomes.py   outcomes -> means, spreads, paired differences;  publish.py  -> markdown, CSV, figures
"""
