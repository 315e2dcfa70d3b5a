"""Host-side planner, compiled from csrc/host."""

from typing import Any

def plan(
    *,
    rows: Any,
    cu_seqlens: Any,
    prompt_lengths: Any,
    num_keys: int,
    response_only: bool,
    skip_first: int,
    window: int | None,
) -> tuple[Any, Any, Any, Any]: ...
