"""gate.mode position: the transport takes κ from the table, by t/T alone and to the bit."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.credit.gate import Envelope, PositionTable
from comppo_mcore.kernels.select import select
from comppo_mcore.model import parallel
from comppo_mcore.model.critic import ValueParts
from comppo_mcore.model.parallel import Layout
from comppo_mcore.trainer.behavior import Behavior
from comppo_mcore.trainer.transport import Credit, Evidence, Gate, transport
from tests import oracle

LENGTHS = (20, 1, 7, 33)
TABLE = PositionTable(tuple(0.3 + 0.02 * b for b in range(20)), (5,) * 20)
REWARDS = (1.0, 0.5, -1.0, 0.25)
LAM = 0.9


@pytest.fixture(scope="module")
def layout() -> Iterator[Layout]:
    yield parallel.initialize(ParallelConfig(), seed=0)
    parallel.shutdown()


def moved(layout: Layout, bootstrap: bool) -> tuple[Behavior, Credit]:
    """Responses without gaps through the transport; the last one was cut by the length limit."""
    config = Config.model_validate(
        {
            "gate": {"mode": "position", "table": "a.json"},
            "transport": {"lam": LAM, "bootstrap_on_truncation": bootstrap},
        }
    )
    generator = torch.Generator().manual_seed(4)
    cu_rows = torch.tensor([0, *(n + bootstrap for n in LENGTHS)]).cumsum(0)
    local, routed, logprob = torch.rand(3, int(cu_rows[-1]), generator=generator) - 0.5
    dead = torch.zeros_like(local, dtype=torch.bool)
    behavior = Behavior(
        cu_rows=cu_rows,
        extra_row=bootstrap,
        logprob=logprob,
        ratio_logprob=logprob,
        entropy=-logprob,
        concentration=None,  # this gate reads no attention
        other_concentration=None,
        empty=None,
        values=ValueParts(local, routed, dead),
        routing=None,
    )
    evidence = Evidence(
        rewards=torch.tensor(REWARDS),
        groups=torch.zeros(len(LENGTHS), dtype=torch.int64),
        masks=tuple((True,) * n for n in LENGTHS),
        truncated=torch.tensor([False, False, False, True]),
    )
    gate = Gate(Envelope(0.1, 0.9, 4.0, LAM), TABLE)
    credit = transport(
        *(behavior, None, evidence, torch.arange(len(LENGTHS)), config, gate, layout, select("reference")),
        advantage_clip=5.0,
        shuffle_seed=0,
    )
    return behavior, credit


def table_gates(length: int) -> list[float]:
    return [TABLE.kappa[20 * t // length] for t in range(length)]


@pytest.mark.parametrize("bootstrap", [False, True])
def test_kappa_is_that_of_the_table(layout: Layout, bootstrap: bool) -> None:
    behavior, credit = moved(layout, bootstrap)
    assert credit.kappa is not None and credit.kappa_rows is not None
    expected = torch.tensor([k for n in LENGTHS for k in table_gates(n)])
    assert torch.equal(credit.kappa, expected)
    assert torch.equal(credit.kappa_rows[behavior.token_rows()], expected)
    if bootstrap:  # the row behind a response has the gate of its end
        assert (credit.kappa_rows[behavior.cu_rows[1:] - 1] == torch.tensor(TABLE.kappa[-1])).all()


@pytest.mark.parametrize("bootstrap", [False, True])
def test_kappa_of_the_table_mixes_values_and_moves_credit(layout: Layout, bootstrap: bool) -> None:
    behavior, credit = moved(layout, bootstrap)
    assert behavior.values is not None and behavior.values.routed is not None
    begin = 0
    for i, n in enumerate(LENGTHS):
        rows = slice(int(behavior.cu_rows[i]), int(behavior.cu_rows[i + 1]))
        local, routed = (x[rows].tolist() for x in (behavior.values.local, behavior.values.routed))
        gates = table_gates(n) + [TABLE.kappa[-1]] * bootstrap
        values = [k * g + (1 - k) * v for k, g, v in zip(gates, routed, local, strict=True)]
        behind = values.pop() if bootstrap else 0.0
        rewards = [0.0] * (n - 1) + [REWARDS[i]]
        _, advantage, _ = oracle.comp_gae(
            rewards, values, gates[:n], [True] * n, LAM, bootstrap=behind if i == 3 else 0.0
        )
        mine = credit.advantage[begin : begin + n].double()
        assert float((mine - torch.tensor(advantage)).abs().max()) <= 1e-6
        begin += n
