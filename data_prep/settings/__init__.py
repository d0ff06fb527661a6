"""Every setting of `neuclip download`, and the published sources with theirs."""
