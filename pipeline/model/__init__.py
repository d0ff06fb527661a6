"""open_clip's image and text towers: building, saving, loading, and what they cost."""
