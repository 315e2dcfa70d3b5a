"""A model folder like the demo's, made smaller still: config.json and tokenizer, no weights."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from comppo_mcore.data.demo_model import write_demo_model

SMALL = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 64, "max_position_embeddings": 64}


def write_small_demo_model(path: Path, **changes: Any) -> Path:
    """The demo's five layers, 32 wide with heads of 16; `changes` of config.json."""
    write_demo_model(path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | SMALL | changes))
    return path
