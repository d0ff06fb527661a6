"""Webdataset shards: their manifest, reading their tars, checking them."""
