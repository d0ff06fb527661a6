"""A DeepSpeed engine's weights and moments as full fp32 tensors by parameter name, at every ZeRO stage.

Reading and writing are collective at stages 1 to 3: every rank accesses the same names in the same order.

The moving average of the weights (EMA) is kept beside the fp32 master weights of this rank: each rank averages the part
that it steps, so that an update needs no communication. The average is gathered in the way of the weights themselves:
for that moment it takes their place.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.optim.swa_utils import get_ema_multi_avg_fn

from pipeline.config import section
from pipeline.distributed.world import World
from pipeline.engine.engine_protocol import EngineState
from pipeline.engine.optim import OptimizerConfig, moment_keys, step_counter
from pipeline.errors import UserError

# The entry of torch's optimizer state that is one number per parameter rather than one per weight.
COUNTER = "step"


class DeepSpeedState:
    """The `EngineState` of a DeepSpeed engine, independent of its stage and of the number of ranks."""

    def __init__(
        self,
        engine: Any,
        *,
        stage: int,
        world: World,
        optimizer: OptimizerConfig,
        frozen: Mapping[str, Tensor] | None = None,
    ) -> None:
        """`frozen`: fp32 values of the parameters that are not trained; the engine may hold them in bf16."""
        self._frozen, self._optimizer = dict(frozen or {}), optimizer
        self._engine, self._stage, self._world = engine, stage, world
        self._clip: nn.Module = engine.module.clip
        inner = engine.optimizer  # in DeepSpeed's wrappers
        while not isinstance(inner, torch.optim.Optimizer):
            inner = inner.optimizer
        self._torch_optimizer = inner

    def named_parameters(self) -> list[tuple[str, nn.Parameter]]:
        """Trainable parameters by open_clip's names, in one fixed order."""
        return [(name, p) for name, p in self._clip.named_parameters() if p.requires_grad]

    def weights(self, *, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        trained = dict(self.named_parameters())
        for name, value in self._state_dict_items():
            full = self._full(value) if name in trained and self._stage > 0 else self._frozen.get(name, value)
            if keep:
                yield name, _on_the_host(full).reshape(self._shape(value))

    def shapes(self) -> dict[str, torch.Size]:
        return {name: self._shape(value) for name, value in self._state_dict_items()}

    def moments(self, *, keep: bool = True) -> Iterator[tuple[str, str, Tensor]]:
        self._link_states()
        states, named = self._torch_optimizer.state, self.named_parameters()
        keys = {
            key for state in states.values() for key, v in state.items() if key != COUNTER and isinstance(v, Tensor)
        }
        for key in sorted(keys):
            for name, p in named:
                if self._stage == 0 and key not in states.get(p, {}):
                    continue  # Muon's matrices have other moments than the rest
                value = self._full(p, key) if self._stage > 0 else states[p][key]
                if keep:
                    yield name, key, _on_the_host(value).reshape(self._shape(p))

    def counter(self) -> int:
        states = [state for state in self._torch_optimizer.state.values() if COUNTER in state]
        return int(states[0][COUNTER]) if states else 0

    def masters(self) -> list[Tensor]:
        if self._stage == 0:
            return [p for _, p in self.named_parameters()]
        # The flat fp32 partitions that the wrapped optimizer steps; each ZeRO wrapper has its own name for them.
        attributes = ("fp32_partitioned_groups_flat", "single_partition_of_fp32_groups", "fp32_groups_flat_partition")
        wrapper = self._engine.optimizer
        return next(list(getattr(wrapper, name)) for name in attributes if hasattr(wrapper, name))

    def load(self, *, weights: Mapping[str, Tensor], moments: Mapping[tuple[str, str], Tensor], counter: int) -> None:
        expected = self.shapes()
        _check_shapes("weights", weights, {**dict.fromkeys(weights), **expected})
        if counter:
            keys = moment_keys(self._optimizer, self._torch_optimizer.param_groups)
            named, given = self.named_parameters(), {name for name, _ in moments}
            if self._stage == 0 and given:  # a parameter that has never had a gradient has no moments
                named = [(name, p) for name, p in named if name in given]
            written = {place: value for place, value in moments.items() if value.dtype == torch.float32}  # by a run
            _check_shapes(
                "optimizer state", written, {(name, key): expected[name] for name, p in named for key in keys(p)}
            )
        trained = dict(self.named_parameters())
        with torch.no_grad():
            for name, value in self._state_dict_items():
                if name in trained:
                    self._set_weight(trained[name], weights[name])
                else:
                    value.copy_(weights[name])
                    if name in self._frozen:
                        self._frozen[name].copy_(weights[name])
            if counter:
                self._load_moments(moments, counter)
            else:  # a checkpoint from before the first update has no moments; this engine may have some by now
                for state in self._torch_optimizer.state.values():
                    for value in state.values():
                        if isinstance(value, Tensor):
                            value.zero_()

    def _full(self, p: Tensor, key: str | None = None) -> Tensor:
        """The whole fp32 master of a parameter of stages 1 to 3, or its moment of this name, on the device."""
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        full: Tensor = safe_get_full_optimizer_state(p, key) if key else safe_get_full_fp32_param(p)
        return full

    def _state_dict_items(self) -> list[tuple[str, Tensor]]:
        """Live parameters and buffers of open_clip's state dict (whose own values are detached at stage 3)."""
        live: dict[str, Tensor] = dict(self._clip.named_parameters())
        persistent = self._clip.state_dict().keys()
        live.update((name, b) for name, b in self._clip.named_buffers() if name in persistent)
        return list(live.items())

    def _shape(self, p: Tensor) -> torch.Size:
        return torch.Size(getattr(p, "ds_shape", p.shape))

    def _set_weight(self, p: nn.Parameter, value: Tensor) -> None:
        """Set the fp32 master and the working copy; DeepSpeed would refresh the latter only at its next step."""
        from deepspeed.runtime.zero import GatheredParameters
        from deepspeed.utils import safe_set_full_fp32_param, safe_set_local_fp32_param

        value = value.to(self._world.device)
        if self._stage == 3:
            safe_set_local_fp32_param(p, self._part(p, value))
        elif self._stage > 0:
            safe_set_full_fp32_param(p, value)
        with GatheredParameters([p], modifier_rank=0, enabled=self._stage == 3):
            if p.numel():
                p.data.copy_(value.to(p.dtype))

    def _part(self, p: Any, value: Tensor) -> Tensor:
        """This rank's part of a whole value at stage 3. DeepSpeed's own functions do not pad it: they fail where the
        ranks do not divide the parameter."""
        size = p.ds_tensor.numel()
        padded = nn.functional.pad(value.flatten(), (0, size * self._world.size - value.numel()))
        return padded[size * self._world.rank :][:size]

    def _load_moments(self, moments: Mapping[tuple[str, str], Tensor], counter: int) -> None:
        from deepspeed.utils import safe_set_full_optimizer_state, safe_set_local_optimizer_state

        optimizer, named, keys = self._torch_optimizer, self.named_parameters(), sorted({key for _, key in moments})
        if self._stage == 0:
            for name, p in named:
                own = [key for key in keys if (name, key) in moments]
                state = {key: moments[name, key].to(p.device, copy=True) for key in own}
                if own or not keys:
                    optimizer.state[p] = {COUNTER: step_counter(optimizer, p, counter), **state}
            return
        for master in self.masters():  # a checkpoint is loaded before the first step, at which its state appears
            state = optimizer.state[master]
            state.setdefault(COUNTER, step_counter(optimizer, master))
            state.update({key: torch.zeros_like(master) for key in keys if key not in state})
        self._link_states()
        for key in keys:
            for name, p in named:
                value = moments[name, key].to(self._world.device)
                if self._stage == 3:
                    safe_set_local_optimizer_state(p, self._part(p, value), key)
                else:
                    safe_set_full_optimizer_state(p, value, key)
        for master, state in optimizer.state.items():
            if COUNTER in state:
                state[COUNTER] = step_counter(optimizer, master, counter)

    def _link_states(self) -> None:
        """Renew the links through which stages 1 and 2 find moments.

        DeepSpeed makes them once, right after the first group's first step: too early for the second group, and too
        late for a checkpoint that is loaded before any step.
        """
        if self._stage in (1, 2):
            self._engine.optimizer._hp_optimizer_states_linked = False
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def _check_shapes(what: str, given: Mapping[Any, Tensor], expected: Mapping[Any, torch.Size | None]) -> None:
    """Check that the expected tensors have been given, and none of those for which None is expected."""
    shapes = {place: value.shape for place, value in given.items()}
    if wrong := sorted(place for place, shape in expected.items() if shapes.get(place) != shape):
        here, there = (sizes.get(wrong[0]) for sizes in (expected, shapes))
        raise UserError(
            f"The checkpoint's {what} do not fit this model: {len(wrong)} differ, for example {wrong[0]} (checkpoint "
            f"{there and tuple(there)}, model {here and tuple(here)}). Use the recipe it was made with."
        )


def _on_the_host(value: Tensor) -> Tensor:
    """A copy in the CPU's memory, in fp32 if it is a floating-point tensor. It is copied once."""
    return value.detach().to("cpu", torch.float32 if value.is_floating_point() else value.dtype, copy=True)


@section
class EmaConfig:
    """Exponential moving average of the weights, in addition to the trained weights."""

    decay: float | None = Field(default=None, gt=0, lt=1)
    """Share of the average that each step keeps, for example 0.9999 in long runs and 0.999 in runs of some thousand
    steps; None: no average. Takes 4 bytes per weight, divided among the ranks at ZeRO stages 1 to 3. While training,
    the average is evaluated and validated instead of the trained weights."""


class WeightAverage:
    """The average of one rank's master weights, for a section with a decay."""

    def __init__(self, config: EmaConfig, state: EngineState) -> None:
        assert config.decay is not None
        self._decay, self._state = config.decay, state
        self.reset()

    def reset(self) -> None:
        """Start again from the current weights."""
        self.updates = 0
        """Steps that are averaged."""
        self._average = [master.detach().clone() for master in self._state.masters()]

    @torch.no_grad()
    def update(self) -> None:
        """Add the weights after a step."""
        # The initial weights do not dominate short runs.
        decay = min(self._decay, (1 + self.updates) / (10 + self.updates))
        masters = [master.detach() for master in self._state.masters()]
        get_ema_multi_avg_fn(decay)(self._average, masters, self.updates)
        self.updates += 1

    def weights(self, *, keep: bool = True) -> Iterator[tuple[str, Tensor]]:
        """The average as full tensors, like `EngineState.weights`, with the trained model's buffers. Collective.

        Meanwhile, the master weights hold the average.
        """
        masters = [master.detach() for master in self._state.masters()]
        kept = [master.clone() for master in masters]
        try:
            for master, average in zip(masters, self._average, strict=True):
                master.copy_(average)
            yield from self._state.weights(keep=keep)
        finally:
            for master, value in zip(masters, kept, strict=True):
                master.copy_(value)

    def load(self, weights: Mapping[str, Tensor], *, updates: int) -> None:
        """Restore an average, given as full tensors. Collective; the engine's weights must be loaded afterwards."""
        self._state.load(weights=weights, moments={}, counter=0)
        self.reset()
        self.updates = updates
