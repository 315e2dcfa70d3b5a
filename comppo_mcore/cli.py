"""The console script `comppo`: a thin face over the trainer's importable functions."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from comppo_mcore import __version__
from comppo_mcore.config.check import check, check_sft
from comppo_mcore.config.describe import batch_line, model_line, sft_batch_line
from comppo_mcore.config.load import dump, load
from comppo_mcore.config.model_shape import ModelShape, read_model_shape
from comppo_mcore.config.schema import Config, ParallelConfig
from comppo_mcore.errors import UserError
from comppo_mcore.processes import (
    ERROR_FILE,
    launch,
    quiet_dependencies,
    report,
    reported_elsewhere,
    set_cpu_defaults,
)


def _train(config: Config) -> None:
    from comppo_mcore.trainer import train

    train.main(config)


def _evaluate(config: Config) -> None:
    from comppo_mcore.trainer import evaluate

    evaluate.main(config)


def _sft(config: Config) -> None:
    from comppo_mcore.trainer import sft

    sft.main(config)


@dataclass(frozen=True)
class Command:
    """A command that runs a configuration, in as many processes as its layout needs."""

    summary: str
    check: Callable[[Config, ModelShape, int], None]
    batch_line: Callable[[Config, int], str]
    run: Callable[[Config], None]


COMMANDS = {
    "train": Command("train, or continue the run that is there", check, batch_line, _train),
    "eval": Command("measure accuracy on the held-out problems", check, batch_line, _evaluate),
    "sft": Command("supervised warm start", check_sft, sft_batch_line, _sft),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code; a user error is one sentence on stderr and code 2."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    args = _parse(arguments)
    set_cpu_defaults()
    quiet_dependencies()
    try:
        if args.command == "gate-table":
            return _gate_table(args)
        if args.command == "convert":
            return _convert(args, arguments)
        return _run(COMMANDS[args.command], args, arguments)
    except UserError as error:
        return report(error)
    except KeyboardInterrupt:
        return 130
    except Exception:
        if reported_elsewhere():
            return UserError.EXIT_CODE
        raise


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="comppo", description="CompPO on Megatron-Core.", allow_abbrev=False
    )
    parser.add_argument("--version", action="version", version=f"comppo {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        _add_config_command(commands, name, command)
    table = commands.add_parser(
        "gate-table", help="average a finished run's κ by position, for gate.mode=position"
    )
    table.add_argument("run_folder", type=Path)
    table.add_argument("--out", type=Path, help="JSON file to write (default: RUN_FOLDER/gate_table.json)")
    _add_convert(commands)
    args, late = parser.parse_known_args(arguments)  # argparse takes no positionals after an option
    unknown = [word for word in late if word.startswith("-") or args.command not in COMMANDS]
    if unknown:
        parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    if late:
        args.overrides = [*args.overrides, *late]
    return args


def _add_config_command(commands: argparse._SubParsersAction, name: str, command: Command) -> None:
    parser = commands.add_parser(name, help=command.summary, description=command.summary, allow_abbrev=False)
    parser.add_argument("config", type=Path, help="YAML file")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="for example train.steps=3")
    parser.add_argument("--nproc", type=int, help="processes on this host (default: tp × pp × cp)")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved configuration and stop")


def _add_convert(commands: argparse._SubParsersAction) -> None:
    summary = "turn a Hugging Face folder into a Megatron checkpoint, or back"
    parser = commands.add_parser("convert", help=summary, description=summary, allow_abbrev=False)
    parser.add_argument(
        "source", metavar="SOURCE", type=Path, help="Hugging Face folder or Megatron checkpoint"
    )
    parser.add_argument("out", metavar="OUT", type=Path, help="folder to write; must not exist")
    parser.add_argument("--to", choices=("megatron", "hf"), required=True)
    parser.add_argument(
        "--template", type=Path, help="Hugging Face folder with config and tokenizer, for --to hf"
    )
    parser.add_argument("--tp", type=_at_least_one, default=1, help="tensor-parallel ranks that do it")
    parser.add_argument("--pp", type=_at_least_one, default=1, help="pipeline stages that do it")
    parser.add_argument("--last-stage-layers", type=_at_least_one, help="default: layers split evenly")
    parser.add_argument("--dtype", choices=("fp32", "bf16"), help="of the weights (default: SOURCE's own)")


def _at_least_one(word: str) -> int:
    if not word.isdecimal() or int(word) < 1:
        raise argparse.ArgumentTypeError(f"'{word}' is not a whole number ≥ 1")
    return int(word)


def _convert(args: argparse.Namespace, arguments: Sequence[str]) -> int:
    if args.tp * args.pp > 1 and "WORLD_SIZE" not in os.environ:
        return launch(arguments, args.tp * args.pp)
    from comppo_mcore.trainer import convert

    layout = ParallelConfig(tp=args.tp, pp=args.pp, last_stage_layers=args.last_stage_layers)
    convert.main(convert.Conversion(args.source, args.out, args.to, layout, args.dtype, args.template))
    return 0


def _run(command: Command, args: argparse.Namespace, arguments: Sequence[str]) -> int:
    """Check all that can be checked without work, then work: here if this is a rank or the only process."""
    config = load(args.config, args.overrides)
    shape = read_model_shape(config.model.path)
    world_size = _world_size(args.nproc, config.parallel)
    command.check(config, shape, world_size)
    if args.dry_run:
        print(dump(config))
    if args.dry_run or _is_first():
        print(command.batch_line(config, world_size), model_line(config, shape), sep="\n", flush=True)
    if args.dry_run:
        return 0
    if world_size > 1 and "WORLD_SIZE" not in os.environ:
        return launch(arguments, world_size)
    command.run(config)
    return 0


def _world_size(nproc: int | None, parallel: ParallelConfig) -> int:
    """Torchrun's, else `--nproc`, else what the layout needs without data parallelism."""
    if "WORLD_SIZE" in os.environ:
        return int(os.environ["WORLD_SIZE"])
    if nproc is not None and nproc < 1:
        raise UserError(f"--nproc is {nproc}; it must be at least 1")
    return nproc or parallel.tp * parallel.pp * parallel.cp


def _is_first() -> bool:
    """The process the user started, or rank 0 of a torchrun of the user's."""
    return ERROR_FILE not in os.environ and os.environ.get("RANK", "0") == "0"


def _gate_table(args: argparse.Namespace) -> int:
    from comppo_mcore.trainer import gate_table

    gate_table.main(args.run_folder, args.out or args.run_folder / "gate_table.json")
    return 0


if __name__ == "__main__":
    sys.exit(main())
