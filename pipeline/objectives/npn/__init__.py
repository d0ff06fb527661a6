"""The normalizer-prediction network (NPN) of NeuCLIP; `reference.py` is the whole algorithm, to be read first."""
