"""The normalizer-prediction network (NPN) of NeuCLIP."""
