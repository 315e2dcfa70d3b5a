"""One command in several processes: started under torchrun, a user error said once and last."""

from __future__ import annotations

import logging
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from comppo_mcore.errors import UserError

ERROR_FILE = "COMPPO_ERROR_FILE"  # environment: where a rank leaves its sentence for the launching process


def set_cpu_defaults() -> None:
    """Before torch is imported, on a host without GPU: ranks share its cores, and compiling never pays."""
    if shutil.which("nvidia-smi") is None:
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")


def quiet_dependencies() -> None:
    """Hide what pinned libraries say about their own future, on which a user cannot act."""
    warnings.filterwarnings("ignore", module=r"megatron\.")
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.")
    # Megatron's optimizer reads `.grad` of parameter shards, on a CPU through our function mode.
    warnings.filterwarnings("ignore", message=r"The \.grad attribute of a Tensor that is not a leaf")
    # Megatron reads checkpoints through parts of torch that have successors.
    warnings.filterwarnings("ignore", module=r"torch\.distributed\.checkpoint\.")
    warnings.filterwarnings("ignore", message="Please use DTensor instead")
    for name in ("models.gpt.gpt_model", "dist_checkpointing.strategies.torch"):
        logging.getLogger(f"megatron.core.{name}").setLevel(logging.ERROR)


def launch(arguments: Sequence[str], num_processes: int, module: str = "comppo_mcore.cli") -> int:
    """Run `python -m <module> <arguments>` as the ranks of one torchrun on this host.

    Torchrun's own report of a failure is kept off the screen: the failing rank's output says more.

    Returns:
        The exit code: 0, or that of the first rank that failed.

    Raises:
        UserError: the one a rank ended with.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.disable(logging.CRITICAL)
    with tempfile.TemporaryDirectory(prefix="comppo-") as folder:
        note = Path(folder) / "error"
        os.environ[ERROR_FILE] = str(note)
        try:
            run(parse_args(["--standalone", f"--nproc-per-node={num_processes}", "-m", module, *arguments]))
        except ChildFailedError as error:
            return _failed(error, note)
        except SignalException as signal:
            return 128 + signal.sigval
        finally:
            del os.environ[ERROR_FILE]
    return 0


def _failed(error: Any, note: Path) -> int:
    if note.exists():
        raise UserError(note.read_text(encoding="utf-8")) from None
    rank, failure = error.get_first_failure()
    how = (
        f"was killed by signal {-failure.exitcode}" if failure.exitcode < 0 else "failed; its error is above"
    )
    print(f"comppo: rank {rank} {how}", file=sys.stderr)
    return failure.exitcode if failure.exitcode > 0 else 128 - failure.exitcode


def report(error: UserError) -> int:
    """Print a user error, once for all ranks of a host, and return the exit code.

    Under `launch` the first rank leaves the sentence to the launching process; under a torchrun of the user's
    the first rank prints it.
    """
    note = _note()
    first = note is None or _leave(note, str(error))
    if first and ERROR_FILE not in os.environ:
        print(f"comppo: error: {error}", file=sys.stderr, flush=True)
    return UserError.EXIT_CODE


def reported_elsewhere() -> bool:
    """Whether a rank of this host ended with a user error: this rank's broken collective is its echo."""
    note = _note()
    return note is not None and note.exists()


def _note() -> Path | None:
    """Where the ranks of this launch leave a user error; None for a process on its own."""
    launched, elastic = os.environ.get(ERROR_FILE), os.environ.get("TORCHELASTIC_ERROR_FILE")
    if launched:
        return Path(launched)
    return Path(elastic).parents[1] / "comppo-error" if elastic else None


def _leave(path: Path, text: str) -> bool:
    """Whether this process was the first to write `path`, which others see whole or not at all."""
    draft = path.with_name(f"{path.name}-{os.getpid()}")
    draft.write_text(text, encoding="utf-8")
    try:
        os.link(draft, path)
    except FileExistsError:
        return False
    finally:
        draft.unlink()
    return True
