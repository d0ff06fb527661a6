"""The built-in corpus: procedural images and captions, served by a small web server with simulated failures.

`server.py` serves it (`serve_scenes`) and writes the table of its URLs (`write_url_table`), which is ingested as if it
were CC3M, and `scene_suite.py` writes the held-out tasks. Everything is a pure function of the config (`ScenesConfig`
in `scene.py`) and the index of a scene, so nothing needs to be stored.
"""
