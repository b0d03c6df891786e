"""`samebits fingerprint`: the tree behind the hash, of a running server or of a start; or what
differs between two.

Exit codes: 0 printed, or equal; 1 the two differ; 2 a source can't be read or the start can't go
on.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from server import fingerprint
from server.receiptlog import SCHEMA as LOG_SCHEMA


class NoTree(ValueError):
    """A source that holds no fingerprint tree."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    from server.cli import add_settings

    parser.add_argument("--base-url", help="ask a running server; else the model is loaded for it")
    parser.add_argument("--save", type=Path, help="write the tree to this file, for --diff")
    parser.add_argument("--short", action="store_true", help="print the short hash only")
    parser.add_argument(
        "--diff",
        nargs=2,
        metavar=("A", "B"),
        help="say what differs; each a saved tree, a receipts log, or a server's URL",
    )
    add_settings(parser)


def run(args: argparse.Namespace) -> int:
    """The command: results to standard output, faults to standard error."""
    from config.determinism import Conflict
    from config.settings import SettingsError

    try:
        if args.diff:
            return _diff(*(tree_from(source) for source in args.diff))
        tree = tree_from(args.base_url) if args.base_url else asyncio.run(_opened(args))
    except (NoTree, SettingsError, Conflict) as fault:
        sys.stderr.write(f"samebits fingerprint: {fault}\n")
        return 2
    except Exception as fault:
        if not hasattr(
            fault, "exit_code"
        ):  # a StartFault carries one; anything else is a fault of ours
            raise
        sys.stderr.write(f"samebits fingerprint: {fault}\n")
        return int(fault.exit_code)
    text = json.dumps(tree, indent=1, ensure_ascii=False, sort_keys=True)
    if args.save:
        args.save.write_text(text + "\n", encoding="utf-8")
    sys.stdout.write(fingerprint.short(tree) + "\n" if args.short else _shown(tree, text))
    return 0


def tree_from(source: str) -> Mapping[str, Any]:
    """The tree of a server (a URL) or a file (a saved tree or a receipts log). Raises `NoTree`."""
    if source.startswith(("http://", "https://")):
        return _served(source)
    try:
        with Path(source).open(encoding="utf-8") as file:
            first = file.readline(64 << 20)
            value = _json(first) or _json(first + file.read(64 << 20))
    except (OSError, UnicodeDecodeError) as fault:
        raise NoTree(f"{source}: {fault}") from None
    if isinstance(value, dict) and value.get("schema") == LOG_SCHEMA:
        value = value.get("tree")
    return _checked(value, source)


def _served(url: str) -> Mapping[str, Any]:
    import httpx

    from server.asking import root_of

    try:
        body = httpx.get(f"{root_of(url)}/version", timeout=10.0).json()
    except (httpx.HTTPError, ValueError) as fault:
        raise NoTree(f"{url}: {fault}") from None
    return _checked(body.get("fingerprint") if isinstance(body, dict) else None, url)


async def _opened(args: argparse.Namespace) -> Mapping[str, Any]:
    """The tree of an engine opened for it, and closed again."""
    from server.cli import start_from

    start = start_from(args)
    from server.vllm_engine import open_engine

    engine = await open_engine(start)
    try:
        return engine.fingerprint_tree
    finally:
        await engine.close()


def _diff(left: Mapping[str, Any], right: Mapping[str, Any]) -> int:
    found = fingerprint.diff(left, right)
    names = f"{fingerprint.short(left)} / {fingerprint.short(right)}"
    if not found:
        sys.stdout.write(f"{names}: the same\n")
        return 0
    lines = "".join(f"  {difference.words}\n" for difference in found)
    sys.stdout.write(f"{names}: {len(found)} differences\n{lines}")
    return 1


def _shown(tree: Mapping[str, Any], text: str) -> str:
    return f"{fingerprint.short(tree)}\n{fingerprint.digest(tree)}\n{text}\n"


def _checked(value: Any, source: str) -> Mapping[str, Any]:
    if not isinstance(value, dict) or value.get("schema") != fingerprint.SCHEMA:
        raise NoTree(f"{source}: holds no fingerprint tree of schema {fingerprint.SCHEMA}")
    return value


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None
