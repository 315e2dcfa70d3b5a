"""Runs a compiler command and prints what it took: the RULE_LAUNCH_COMPILE of CMakeLists.txt."""

import os
import resource
import subprocess
import sys

status = subprocess.run(sys.argv[1:], check=False).returncode
usage = resource.getrusage(resource.RUSAGE_CHILDREN)
target = sys.argv[sys.argv.index("-o") + 1] if "-o" in sys.argv else sys.argv[-1]
name = os.sep.join(target.split(os.sep)[-3:]).removesuffix(".o")
print(f"{usage.ru_utime + usage.ru_stime:6.1f} s  {name}", flush=True)
sys.exit(status)
