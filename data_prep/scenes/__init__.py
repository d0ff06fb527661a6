"""The built-in corpus: procedural images and captions, served by a small web server with simulated failures.

`serve_scenes` in `server.py` serves it while a block runs. `write_url_table` in `published.py` writes the table of its
URLs, which is ingested as if it were CC3M, and `write_suite` in `scene_suite.py` the held-out tasks. Everything is a
pure function of the config (`ScenesConfig` in `scene.py`) and the index of a scene, so nothing needs to be stored.
"""
