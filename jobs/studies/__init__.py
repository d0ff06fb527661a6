"""Studies: declared sets of runs (methods x settings x seeds) that end in tables and figures.

NAME.yaml     what is compared (`declare.py` reads it)
unit.py       one run with its measurements, in a process of its own
schedule.py   all units of a study over the devices at hand
results.py    outcomes -> means, spreads, paired differences;  render.py  -> markdown, CSV, figures
"""
