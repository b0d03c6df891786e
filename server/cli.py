"""The command `samebits`: serve | check | replay | batch | doctor | fingerprint.

Exit codes: 0 all well; 1 a difference was found, or the engine died; 2 the start can't go on
(settings, model, port, memory); 3 an op failed its check.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, get_args

from config import determinism
from config.device import detect
from config.settings import Settings, SettingsError, load

COMMANDS = {
    "serve": "serve a model over HTTP",
    "check": "run the long check of every op and write a report",
    "replay": "ask everything in a receipts log again and compare",
    "batch": "answer a file of requests",
    "doctor": "say what this machine can promise, and what stands in the way",
    "fingerprint": "print what the fingerprint is taken over, or compare two",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    parser = _parser(words[0] if words else "")
    args, unknown = parser.parse_known_args(words)
    if unknown:
        parser.error(_not_taken(unknown))
    if args.command == "serve":
        return serve(args)
    module = importlib.import_module(f"server.{args.command}")
    code: int = module.run(args)
    return code


def program() -> NoReturn:
    """`main` as a process. It ends without the interpreter's own teardown: all that matters is
    closed by then, and threads of native libraries were seen to crash there, once in many ends.
    """
    try:
        code = main()
    except SystemExit as end:  # argparse
        code = end.code if isinstance(end.code, int) else int(bool(end.code))
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _parser(chosen: str) -> argparse.ArgumentParser:
    """The parser; only the chosen command's module is imported for its arguments."""
    parser = argparse.ArgumentParser(prog="samebits", description=__doc__, allow_abbrev=False)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, what in COMMANDS.items():
        sub = commands.add_parser(name, help=what, description=what, allow_abbrev=False)
        if name == "serve":
            add_settings(sub)
        elif name == chosen:
            importlib.import_module(f"server.{name}").add_arguments(sub)
    return parser


def _not_taken(words: Sequence[str]) -> str:
    """What to say of flags that no command has: those of vLLM's that are refused, with the
    remedy.
    """
    for word in words:
        flag = word.partition("=")[0]
        refused = determinism.not_offered(flag.removeprefix("--").replace("-", "_"))
        if flag.startswith("--") and refused:
            return f"{flag}: {refused}"
    return f"unrecognized arguments: {' '.join(words)}"


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Every setting as a flag: `--max-num-seqs 8`. Values are checked by Settings, not here."""
    parser.add_argument("--profile", help="a profile file, or the name of one that ships")
    for name, field in Settings.model_fields.items():
        flag = "--" + name.replace("_", "-")
        choices = ", ".join(map(str, get_args(field.annotation)))
        default = "" if field.default is None else f" (default: {field.default})"
        text = (field.description or choices or name).replace("%", "%%")
        parser.add_argument(flag, dest=f"set_{name}", metavar="VALUE", help=text + default)


def settings_from(args: argparse.Namespace) -> Settings:
    """Settings from flags, environment and profile. Raises `SettingsError`."""
    flags = {k.removeprefix("set_"): v for k, v in vars(args).items() if k.startswith("set_")}
    return load(flags, profile=getattr(args, "profile", None))


def start_from(args: argparse.Namespace) -> Any:
    """Everything that is decided before vLLM is imported, applied to this process: a Start.

    Raises `SettingsError`, `determinism.Conflict` or `vllm_start.StartFault`.
    """
    from server import logs
    from server.vllm_start import Start, check_machine, resolve_model

    settings = settings_from(args)
    logs.configure(settings)
    device = detect(settings.device)
    forced = determinism.apply(settings, device.kind)
    determinism.export(determinism.process_variables(settings, device.kind))
    log = logging.getLogger("samebits")
    log.info("device: %s (%s)", device.kind, device.reason)
    if settings.determinism == "off":
        log.warning("DETERMINISM IS OFF: plain vLLM, no promise about bits")
    check_machine(settings, device.kind)
    model = resolve_model(settings)
    log.info("model: %s", model)
    name = settings.served_model_name or settings.model
    return Start(settings, device.kind, device.reason, forced, model, name)


def fail(fault: BaseException) -> int:
    """One clear line on stderr; the exit code that goes with it."""
    sys.stderr.write(f"samebits: {fault}\n")
    return int(getattr(fault, "exit_code", 2))


def serve(args: argparse.Namespace) -> int:
    """`samebits serve`."""
    from server.vllm_start import StartFault

    gc.disable()  # imports make a million objects that stay; open_engine turns it on again

    try:
        start = start_from(args)
    except (SettingsError, determinism.Conflict, StartFault) as fault:
        return fail(fault)
    from server.serve import run
    from server.vllm_engine import open_engine

    return run(start.settings, lambda _: open_engine(start))
