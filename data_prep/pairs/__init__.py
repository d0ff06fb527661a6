"""Convert existing image-text pairs in any supported format to webdataset shards with a manifest."""
