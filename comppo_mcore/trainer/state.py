"""What a run carries from one step to the next, beside weights and optimizer."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

from comppo_mcore.config.schema import Config
from comppo_mcore.credit.controller import ControllerState
from comppo_mcore.credit.gate import Envelope, PositionTable
from comppo_mcore.rollout import groups
from comppo_mcore.rollout.groups import Group
from comppo_mcore.trainer import history
from comppo_mcore.trainer.history import History
from comppo_mcore.trainer.transport import Gate


@dataclass(frozen=True)
class RunState:
    """After `step` training steps; equal on every rank, JSON in a checkpoint."""

    gate: Gate
    step: int = 0
    prompts_consumed: int = 0  # position in the data
    controller: ControllerState = field(default_factory=ControllerState)
    calibrated: bool = False  # the envelope was fitted to the first rollout batch
    bad_steps: int = 0  # consecutive ones
    history: History = ()
    carried: tuple[Group, ...] = ()  # begun, and left for a later step

    def to_json(self, config: Config) -> dict[str, Any]:
        """The state and the configuration it was made under."""
        table = self.gate.table
        return {
            "config": config.model_dump(mode="json"),
            "step": self.step,
            "prompts_consumed": self.prompts_consumed,
            "controller": self.controller.to_dict(),
            "envelope": asdict(self.gate.envelope),
            "table": None if table is None else asdict(table),
            "calibrated": self.calibrated,
            "bad_steps": self.bad_steps,
            "history": history.to_json(self.history),
            "carried": groups.to_json(self.carried),
        }


def initial_state(config: Config, table: PositionTable | None) -> RunState:
    """The state of a fresh run."""
    gate = config.gate
    envelope = Envelope(gate.kappa_lo, gate.kappa_hi, gate.tau, config.transport.lam)
    return RunState(Gate(envelope, table))


def from_json(record: dict[str, Any]) -> RunState:
    """Inverse of `RunState.to_json`, the configuration aside."""
    table = record["table"]
    if table is not None:
        table = PositionTable(tuple(table["kappa"]), tuple(table["count"]))
    return RunState(
        gate=Gate(Envelope(**record["envelope"]), table),
        step=record["step"],
        prompts_consumed=record["prompts_consumed"],
        controller=ControllerState.from_dict(record["controller"]),
        calibrated=record["calibrated"],
        bad_steps=record["bad_steps"],
        history=history.from_json(record["history"]),
        carried=groups.from_json(record.get("carried", [])),
    )
