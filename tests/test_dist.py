"""The helper that the multi-process tests rely on: failures are readable and leave nothing behind."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.dist import run_distributed


@pytest.mark.parametrize(
    ("how", "timeout", "message"), [("raise", 60, "rank 1 is broken"), ("hang", 5, "still running after 5 s")]
)
def test_a_broken_worker_is_reported_and_ended(
    tmp_path: Path, how: str, timeout: float, message: str
) -> None:
    with pytest.raises(AssertionError, match=message) as caught:
        run_distributed("misbehave.py", 2, [how, tmp_path], timeout)
    assert "rank 0 ---" not in str(caught.value)  # only the rank that failed is shown
    for path in tmp_path.iterdir():
        with pytest.raises(ProcessLookupError):
            os.kill(int(path.read_text()), 0)
