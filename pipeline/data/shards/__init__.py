"""Webdataset shards: the manifest, reading tar files from disk and from object stores, checks before a run."""
