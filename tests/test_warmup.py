"""The critic warms up and nothing of the actor changes; the critic is fp32 in a bf16 model, restored too."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from comppo_mcore.model import checkpoint
from tests.bigram_policy import write_bigram_policy
from tests.dist import run_distributed

CONFIG = """
model: {{path: {folder}/model}}
parallel: {{pp: 2, last_stage_layers: 4, timeout_minutes: 2}}
data: {{source: arithmetic, arithmetic: {{steps: 2}}}}
rollout: {{prompts: 4, responses: 2, max_response_tokens: 12, top_p: 1.0}}
critic: {{warmup_steps: 2, lr: 1e-2, width: 16, head_width: 16}}
optim: {{lr: 1e-2, weight_decay: 0.1}}
reward: {{workers: 1}}
controller: {{preset: "off"}}
train: {{eval_every: 0, eval_problems: 4, save_every: 3, keep_best: false}}
log: {{tensorboard: false, progress: false}}
run: {{dir: {folder}/runs}}
"""


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What tests/workers/warmup.py found on each pipeline stage; the critic is on the second."""
    folder = tmp_path_factory.mktemp("warmup")
    write_bigram_policy(folder / "model", tied=True)
    (folder / "config.yaml").write_text(CONFIG.format(folder=folder))
    outputs = run_distributed("warmup.py", 2, [folder / "config.yaml"])
    return [json.loads(out.splitlines()[-1]) for out in outputs]


@pytest.fixture(params=["fp32", "bf16"])
def both(request: pytest.FixtureRequest, ranks: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The runs of one precision, which came to their ends."""
    found = [rank[request.param] for rank in ranks]
    assert [x["end"] for x in found] == ["", ""]
    return found


def test_warm_up_moves_the_critic_and_no_bit_of_the_actor(both: list[dict[str, Any]]) -> None:
    """Weights, fp32 main weights, Adam moments and step counts; two steps of warm-up, then one of both."""
    first_stage, last_stage = (x["moved"] for x in both)
    assert [step["actor"] for step in first_stage] == [False, False, True]
    assert [step["actor"] for step in last_stage] == [False, False, True]
    assert [step["critic"] for step in last_stage] == [True, True, True]


def test_adam_counts_the_steps_of_each_role(both: list[dict[str, Any]]) -> None:
    """2 epochs × 2 minibatches a step; the actor's 2 steps are the third and the fourth."""
    assert [x["steps"] for x in both] == [{"actor": 2 * 4, "critic": 4 * 4}] * 2


def test_a_checkpoint_restores_every_bit(both: list[dict[str, Any]]) -> None:
    """With tied embeddings, whose second copy lives on the last stage."""
    assert [x["restored"] for x in both] == [True, True]


@pytest.mark.parametrize(("dtype", "of_actor"), [("fp32", "torch.float32"), ("bf16", "torch.bfloat16")])
def test_the_critic_is_fp32_built_and_restored(
    ranks: list[dict[str, Any]], dtype: str, of_actor: str
) -> None:
    for built in ranks[1][dtype]["dtypes"]:
        assert built == {"actor": [of_actor], "critic": ["torch.float32"], "optimizer": ["torch.float32"]}


def test_a_critic_in_another_precision_is_noticed() -> None:
    model = torch.nn.Module()
    model.critic = torch.nn.Linear(2, 2)
    checkpoint.assert_critic_fp32(model)
    model.critic.bfloat16()
    with pytest.raises(AssertionError, match="critic parameters must be fp32"):
        checkpoint.assert_critic_fp32(model)
