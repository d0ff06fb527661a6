"""From URLs to samples: img2dataset with a guard and a supervisor."""

import os

# Albumentations, which img2dataset uses to resize, checks for newer versions online when it is imported.
os.environ.setdefault("NO_ALBUMENTATIONS_UPDATE", "1")
