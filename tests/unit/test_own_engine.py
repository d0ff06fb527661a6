"""An engine added in one file that calls `register_engine`, and DeepSpeed files that are refused."""

import json

import pytest
import torch
from torch import Tensor

from pipeline.engine.engine_config import DS_CONFIGS, EngineConfig, deepspeed_settings
from pipeline.engine.engine_protocol import ENGINES, EngineFacts, register_engine
from pipeline.engine.optim import OptimizerConfig, build_optimizer, parameter_groups
from pipeline.errors import UserError
from tests.metrics import metrics
from tests.training import prepare, settings_in, train_here


class PlainState:
    """fp32 weights and moments as they are in memory."""

    def __init__(self, towers, optimizer):
        self._towers, self._optimizer = towers, optimizer

    def weights(self, *, keep=True):
        return ((name, value.detach().clone()) for name, value in self._towers.clip.state_dict().items() if keep)

    def moments(self, *, keep=True):
        for name, p in self._towers.clip.named_parameters():
            for key, value in self._optimizer.state.get(p, {}).items():
                if key != "step" and keep:
                    yield name, key, value.clone()

    def counter(self):
        return max((int(state["step"]) for state in self._optimizer.state.values()), default=0)

    def shapes(self):
        return {name: value.shape for name, value in self._towers.clip.state_dict().items()}

    def masters(self):
        return [p for group in self._optimizer.param_groups for p in group["params"]]

    def load(self, *, weights, moments, counter):
        self._towers.clip.load_state_dict(dict(weights))


@register_engine("plain")
class PlainEngine:
    """Plain PyTorch on one rank."""

    bf16, dtype = False, torch.float32

    @staticmethod
    def facts(config, *, optimizer, global_batch, world_size):
        if world_size > 1:
            raise UserError("engine.name = 'plain' trains on one rank.")
        return EngineFacts(stage=0, bf16=False, dtype=torch.float32, bucket=0)

    def __init__(self, towers, *, optimizer, world, **_):
        self.module, self.world, self.optimizer_config = towers, world, optimizer
        self._optimizer = build_optimizer(optimizer, parameter_groups(towers, optimizer))
        self.state = PlainState(towers, self._optimizer)

    def forward(self, image, text):
        features: tuple[Tensor, Tensor] = self.module(image, text)
        return features

    def backward(self, features, gradients):
        torch.autograd.backward(features, gradients)

    def step(self, *, lr_scale):
        applied = all(bool(p.grad.isfinite().all()) for p in self.module.parameters() if p.grad is not None)
        if applied:
            for group in self._optimizer.param_groups:
                group["lr"] = self.optimizer_config.lr * lr_scale * group["lr_share"]
            self._optimizer.step()
        self._optimizer.zero_grad()
        return applied

    def gradient_norm(self):
        return None


def test_a_registered_engine_trains_like_deepspeed(tmp_path):
    prepare(tmp_path)
    for name in ("plain", "deepspeed"):
        train_here(*settings_in(tmp_path, name, f"engine.name={name}", "samples=32", "engine.deepspeed=zero0_fp32"))
    plain, deepspeed = ([r["loss"] for r in metrics(tmp_path / name, "train")] for name in ("plain", "deepspeed"))
    assert len(plain) == 4
    assert plain == pytest.approx(deepspeed, rel=1e-5)


def test_it_is_planned_and_refused_by_its_own_facts():
    facts = ENGINES["plain"].facts(EngineConfig(), optimizer=OptimizerConfig(), global_batch=8, world_size=1)
    assert facts.stage == 0
    with pytest.raises(UserError, match="trains on one rank"):
        ENGINES["plain"].facts(EngineConfig(), optimizer=OptimizerConfig(), global_batch=8, world_size=2)
    with pytest.raises(UserError, match=r"engine.name = 'fsdp2': no such engine.*deepspeed"):
        ENGINES["fsdp2"]
    with pytest.raises(UserError, match=r"called 'deepspeed', but the engine .*DeepSpeedEngine has this name"):
        register_engine("deepspeed")(PlainEngine)


def facts(deepspeed="auto", *, ranks=1, **given):
    config = EngineConfig(deepspeed=deepspeed, **given)
    return ENGINES["deepspeed"].facts(config, optimizer=OptimizerConfig(), global_batch=64, world_size=ranks)


def test_stage_2_does_not_reduce_gradients_for_every_micro_batch():
    with pytest.raises(UserError, match=r"once for every micro-batch.*engine.deepspeed=zero1_bf16"):
        facts("zero2_bf16", ranks=2, micro_batch=16)
    assert facts("zero2_bf16", ranks=2, micro_batch=32).stage == 2, "one micro-batch"
    assert facts(ranks=2, micro_batch=16).stage == 1
    assert facts("zero2_bf16", ranks=1, micro_batch=16).stage == 2, "nothing is reduced"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"tensorboard": {"enabled": True}}, "'tensorboard', which a DeepSpeed file cannot set"),
        ({"gradient_cliping": 1.0}, "'gradient_cliping', which"),
        ({"zero_optimization": {"stage": 1, "stag": 2}}, r"zero_optimization\.'stag', which"),
        ({"zero_optimization": {"stage": 1, "zenflow": {}}}, "'zenflow', which"),
        ({"zero_optimization": {"stage": 1, "offload_optimizer": {"nvme_path": "/"}}}, "'nvme_path', which"),
        ({"train_batch_size": 32}, "train_batch_size = 32, but the recipe makes it 8"),
        ({"optimizer": {"type": "Adam"}}, "'optimizer', which .*optimizer, schedule and .* are the recipe's"),
        ({"managed_gradient_accumulation": True}, "must set managed_gradient_accumulation to false"),
        ({"bf16": {"enabled": True}}, "stage 0.*torch_autocast"),
        ({"zero_optimization": {"stage": "one"}}, "stage = 'one'"),
        ({"zero_optimization": 3}, "must be a JSON object"),
        ({"bf16": True}, "must be a JSON object"),
        ({"bf16": {"enabled": True, "check_grad_overflow": False}}, "applies gradients of inf and NaN: remove it"),
        ([], "must hold a JSON object, not a list"),
        ("{", "not a readable JSON file"),
    ],
)
def test_a_deepspeed_file_with_unknown_keys_or_against_the_recipe_is_refused(given, message, tmp_path):
    file, settings = tmp_path / "own.json", {"managed_gradient_accumulation": False}
    file.write_text(given if given == "{" else json.dumps(settings | given if isinstance(given, dict) else given))
    with pytest.raises(UserError, match=message):
        deepspeed_settings(EngineConfig(deepspeed=str(file)), global_batch=8, world_size=1)


def test_a_deepspeed_file_may_have_settings_of_stage_3_and_never_applies_gradients_of_nan(tmp_path):
    """Regression test: DeepSpeed's default for bf16 is to apply them."""
    zero = {"stage": 3, "stage3_prefetch_bucket_size": 1000, "offload_optimizer": {"device": "cpu"}}
    own = {"managed_gradient_accumulation": False, "zero_optimization": zero, "bf16": {"enabled": True}}
    (file := tmp_path / "own.json").write_text(json.dumps(own))
    found = deepspeed_settings(EngineConfig(deepspeed=str(file)), global_batch=8, world_size=1)
    assert found["zero_optimization"] == zero
    assert found["bf16"] == {"enabled": True, "check_grad_overflow": True}


def test_values_that_deepspeed_refuses_are_a_user_error(tmp_path):
    file = tmp_path / "own.json"
    settings = json.loads((DS_CONFIGS / "zero1_fp32.json").read_text())
    settings["zero_optimization"]["reduce_bucket_size"] = -5
    file.write_text(json.dumps(settings))
    with pytest.raises(UserError, match=r"DeepSpeed refuses engine.deepspeed"):
        train_here(*settings_in(prepare(tmp_path), "run", "samples=32", f"engine.deepspeed={file}"))
