"""The `comppo` command with one thing going wrong, named by the environment variable FAULT.

stall_in_save:<step>:<file>  in the save of a step, between shards and manifest: write the file, then sleep
"""

from __future__ import annotations

import os
import sys
import time
from functools import partial
from pathlib import Path

from comppo_mcore import cli


def stall_in_save(step: str, marker: str) -> None:
    from comppo_mcore.model import checkpoint

    original = checkpoint._checksums

    def stalling(folder, layout):
        if folder.name.startswith(f"step_{int(step):08d}"):
            Path(marker).touch()
            time.sleep(600)
        return original(folder, layout)

    checkpoint._checksums = stalling


FAULTS = {"stall_in_save": stall_in_save}


if __name__ == "__main__":
    if "WORLD_SIZE" in os.environ:
        fault, *arguments = os.environ["FAULT"].split(":")
        FAULTS[fault](*arguments)
    else:
        cli.launch = partial(cli.launch, module="tests.workers.faulty")
    sys.exit(cli.main())
