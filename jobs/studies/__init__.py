"""Studies: declared sets of runs (methods x settings x seeds) whose results are rendered as tables and figures.

NAME.yaml     the declaration of a study (read by `declare.py`)
unit.py       one run with its measurements and costs, in its own process
outcomes.py   outcomes -> means, spreads, paired differences;  publish.py  -> markdown, CSV, figures
"""
