"""`import neuclip`: its names, similarity of images and texts, and an objective in somebody else's training loop."""

import io
import warnings
from pathlib import Path

import open_clip
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

import neuclip
from pipeline.errors import UserError
from tests.shards import jpeg
from tests.unit.test_export import write_run

TEXTS = ["a red square", "two dogs", "the sea"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return write_run(tmp_path_factory.mktemp("public") / "run", bias=0.0)


def test_every_public_name_can_be_used():
    assert all(getattr(neuclip, name) is not None for name in neuclip.__all__)
    assert neuclip.build_objective("openclip", dim=8, batch_size=4).config.name == "openclip"
    with pytest.raises(AttributeError, match=r"no attribute 'scores'; it has .*score"):
        _ = neuclip.scores


def test_score_equals_open_clips_cosines_for_any_batch_size(run, tmp_path):
    paths = [tmp_path / f"{number}.jpg" for number in range(3)]
    for number, path in enumerate(paths):
        path.write_bytes(jpeg(number))
    model = neuclip.load(str(run))
    folder = run / "checkpoints" / "step-00000010"
    clip, preprocess = open_clip.create_model_from_pretrained(f"local-dir:{folder}")
    images = torch.stack([preprocess(Image.open(path)) for path in paths])
    with torch.no_grad():
        image = clip.eval().encode_image(images, normalize=True)
        text = clip.encode_text(open_clip.get_tokenizer(f"local-dir:{folder}")(TEXTS), normalize=True)
    found = neuclip.score(model, paths, TEXTS, batch_size=2)
    torch.testing.assert_close(found, (image * text).sum(1), rtol=0, atol=1e-5)
    opened = [Image.open(io.BytesIO(path.read_bytes())) for path in paths]
    torch.testing.assert_close(neuclip.score(model, opened, TEXTS[:2], matrix=True), image @ text[:2].T, rtol=0,
                               atol=1e-5)  # fmt: skip
    assert neuclip.score(str(run), [], []).shape == (0,)
    assert torch.equal(neuclip.score(model, str(paths[0]), TEXTS[0]), neuclip.score(model, paths[:1], TEXTS[:1])[0])
    assert neuclip.score(model, opened[0], TEXTS[0]).shape == ()
    assert neuclip.score(model, opened[0], TEXTS[:1]).shape == (1,)
    assert neuclip.score(model, opened[0], TEXTS, matrix=True).shape == (1, 3)


def test_models_are_named_by_paths_and_mistakes_are_user_errors(run, tmp_path, monkeypatch):
    assert neuclip.load(run).source == neuclip.load(str(run)).source
    Image.open(io.BytesIO(jpeg(3))).save(tmp_path / "a.png")
    assert neuclip.score(run, [tmp_path / "a.png"], TEXTS[:1]).shape == (1,)
    (tmp_path / "no.jpg").write_text("no image")
    (tmp_path / "bomb.jpg").write_bytes(jpeg(0, size=(30, 20)))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 100)
    for model, images, texts, message in (
        (Path("nope"), [], [], "'nope' is neither a folder"),
        (run, [tmp_path / "no.jpg"], TEXTS, "1 images and 3 texts were given"),
        (run, ["a\0.jpg"], "a", r"cannot be read \(embedded null byte"),
        (run, [tmp_path / "no.jpg"], TEXTS[:1], r"no\.jpg cannot be read"),
        (run, [tmp_path / "bomb.jpg"], TEXTS[:1], r"bomb\.jpg cannot be read"),
    ):
        with pytest.raises(UserError, match=message):
            neuclip.score(model, images, texts)
    with pytest.raises(UserError, match="batch_size = -1 must"):  # or nothing would be compared
        neuclip.score(run, [], [], batch_size=-1)


B, D = 6, 8


def features(rows=B, dim=D):
    return F.normalize(torch.randn(rows, dim, generator=torch.Generator().manual_seed(0)), dim=1)


def test_wrong_inputs_are_refused():
    objective = neuclip.build_objective("sogclr", dim=D, batch_size=B, dataset_size=10)
    for image, text, ids, message in (
        (features(dim=4), features(dim=4), torch.arange(B), r"shapes \(6, 4\) .* and \(6, 4\) .*\[b, 8\]"),
        (features().numpy(), features(), torch.arange(B), r"Features are ndarray: both have to be tensors .*\[b, 8\]"),
        (features(), features(rows=5), torch.arange(B), r"\(6, 8\) \(image\) and \(5, 8\) \(text\)"),
        (features()[0], features()[0], torch.arange(B), r"shapes \(8,\)"),
        (features(), features(), torch.arange(B).float(), r"sample_ids is torch.float32 of shape \(6,\).*torch.int64"),
        (features(), features(), list(range(B)), r"sample_ids is list: .* shape \(6,\)"),
        (features(), features(), torch.arange(5), r"of shape \(5,\).*shape \(6,\)"),
        (features(), features(), None, "keeps state per sample"),
    ):
        with pytest.raises(neuclip.UserError, match=message):
            objective.loss(image, text, sample_ids=ids)
    for facts, message in (
        ({"batch_size": 0, "dataset_size": 5}, "batch_size = 0: has to be an integer, 1 or more"),
        ({"batch_size": "8", "dataset_size": 5}, "batch_size = '8': has"),
        ({"dim": 8.0}, r"dim = 8\.0: has"),
        ({"dataset_size": None}, "dataset_size = None: has to be an integer, 0 or more"),
        ({"dataset_size": 5, "seed": -1}, "seed = -1: has to be an integer, 0 or more"),
        ({"tau_init": 0.05}, r'does not know tau_init\. .*\{"name": "neuclip", "tau_init": 0.05\}'),
    ):
        with pytest.raises(neuclip.UserError, match=message):
            neuclip.build_objective("openclip", **{"dim": D, "batch_size": B, **facts})


def test_features_that_are_not_normalized_are_reported_once():
    objective = neuclip.build_objective("openclip", dim=D, batch_size=B)
    with pytest.warns(UserWarning, match="length 1, and those of the first batch differ by up to 9"):
        objective.loss(10 * features(), features())
    objective.commit()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        objective.loss(10 * features(), features())
        neuclip.build_objective("openclip", dim=D, batch_size=B).loss(features().bfloat16(), features().bfloat16())


def test_the_temperature_is_copied_into_the_model():
    image = {"layers": 1, "width": 16, "head_width": 8, "patch_size": 8, "image_size": 16}
    text = {"layers": 1, "width": 16, "heads": 2, "context_length": 4, "vocab_size": 16}
    model = open_clip.model.CLIP(D, image, text)
    objective = neuclip.build_objective({"name": "neuclip", "tau_init": 0.05}, dim=D, batch_size=B, dataset_size=10)
    objective.apply_to(model)
    assert model.logit_scale.exp().item() == pytest.approx(20)
    siglip = neuclip.build_objective("siglip", dim=D, batch_size=B)
    with pytest.raises(neuclip.UserError, match="has no logit_bias, which would be -10"):
        siglip.apply_to(model)
    neuclip.build_objective({"name": "siglip", "bias_init": 0.0}, dim=D, batch_size=B).apply_to(model)
    with pytest.raises(neuclip.UserError, match="Linear has no logit_scale"):
        objective.apply_to(torch.nn.Linear(1, 1))
