"""From URLs to samples: img2dataset with a guard and a supervisor."""
