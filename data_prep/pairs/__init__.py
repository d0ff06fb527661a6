"""Image-text pairs that are here already, in whatever form, as webdataset shards with a manifest."""
