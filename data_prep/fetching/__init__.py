"""From URLs to samples: img2dataset behind a guard, supervised."""
