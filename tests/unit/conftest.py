"""Fixtures that several test files share; what they need is imported when a test asks for them."""

import uuid
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    pass


@pytest.fixture(scope="module")
def towers(tmp_path_factory):
    from pipeline.model.towers import ModelConfig, build_towers
    from tests.towers import write_tiny

    model, architecture = build_towers(ModelConfig(arch=write_tiny(tmp_path_factory.mktemp("towers"))), seed=3)
    return {name: value.detach() for name, value in model.clip.state_dict().items()}, architecture


@pytest.fixture(scope="module")
def model():
    """A model for evaluation."""
    from tests.checkpoints import make_model

    return make_model(0)


@pytest.fixture(scope="module")
def suite(tmp_path_factory):
    """A suite of four tasks, in several layouts."""
    from tests.evaluation_suite import write_one_of_each

    root = tmp_path_factory.mktemp("suite")
    return write_one_of_each(root, "imagenet1k", "fairness/dollar_street", flickr="parquet", winogavil="csv+zip")


@pytest.fixture(scope="module")
def evaluated(model, suite, tmp_path_factory):
    """A folder of the model's results on the suite, which tests only read, and what was returned."""
    from tests.checkpoints import scored

    folder = tmp_path_factory.mktemp("evaluated")
    return folder, scored(model, suite, folder)


@pytest.fixture(scope="module")
def expected(evaluated):
    """The files of the model's results on the suite."""
    from tests.checkpoints import contents

    return contents(evaluated[0])


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    """A place of mirrors; tests/e2e/test_s3.py has an object store."""
    return f"memory://{uuid.uuid4().hex}/runs" if request.param == "memory" else f"file://{tmp_path}/store"
