import atexit
import os
import shutil
import tempfile

if "HF_DATASETS_CACHE" not in os.environ:  # else copies of the tests' tables would stay in the user's cache
    os.environ["HF_DATASETS_CACHE"] = tempfile.mkdtemp(prefix="neuclip-tests-")
    atexit.register(shutil.rmtree, os.environ["HF_DATASETS_CACHE"], ignore_errors=True)
