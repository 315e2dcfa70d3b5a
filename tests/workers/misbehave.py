"""Rank 1 raises or sleeps; rank 0 waits for it. Imports nothing, to be quick."""

import os
import sys
import time
from pathlib import Path

Path(sys.argv[2], os.environ["RANK"]).write_text(str(os.getpid()))
if os.environ["RANK"] == "1" and sys.argv[1] == "raise":
    raise RuntimeError("rank 1 is broken")
time.sleep(600)
