"""Writes docs/forced.md from the table in config/: `python docs/forced.py`."""

from __future__ import annotations

import json
from pathlib import Path

from config import determinism, determinism_ascend
from config.determinism import Force, Row

PAGE = Path(__file__).with_name("forced.md")
HEAD = """# What is forced, and why

Made from the table in `config/determinism.py` and `config/determinism_ascend.py` by
`python docs/forced.py`; a test holds it to them. `samebits serve` sets each of these before torch
or vLLM is imported, so every process of the engine has them. A value of yours that contradicts a
row stops the start with one line that names both and the remedy. So does an option of the table
that is no setting of Samebits, as a variable (`SAMEBITS_ENABLE_LORA`) or as a flag
(`--enable-lora`). `SAMEBITS_DETERMINISM=off` takes all of it away, and the promise with it.

The source of a row is where its reason can be read: a file of vLLM 0.23.0 or vllm-ascend
0.23.0.post1, an issue of theirs, or a vendor's page. Ascend rows were never seen at work on an NPU;
see [ascend.md](ascend.md).
"""


def cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def value(row: Force) -> str:
    if row.value is None:
        return "unset" if row.kind == "env" else "vLLM's default"
    return f"`{row.value}`" if isinstance(row.value, str) else f"`{json.dumps(row.value)}`"


def section(title: str, rows: tuple[Row, ...]) -> list[str]:
    lines = [f"\n## {title}\n"]
    forced = [row for row in rows if isinstance(row, Force)]
    if forced:
        lines += ["| variable or option | value | why | source |", "|---|---|---|---|"]
    for row in forced:
        shown = value(row)
        if row.welcome:
            shown += f" (replaces {', '.join(f'`{w}`' for w in row.welcome)} in silence)"
        why = f"{row.reason}; {row.instead}" if row.instead else row.reason
        lines.append(f"| `{row.name}` | {shown} | {cell(why)} | {cell(row.source)} |")
    refused = [row for row in rows if not isinstance(row, Force)]
    if refused:
        lines += ["\n| refused | why | remedy | source |", "|---|---|---|---|"]
    for other in refused:
        lines.append(
            f"| {cell(other.name)} | {cell(other.reason)} | {cell(other.remedy)} "
            f"| {cell(other.source)} |"
        )
    return lines


def page() -> str:
    """The whole page."""
    lines = [HEAD]
    lines += section("Everywhere", determinism.COMMON)
    lines += section("CPU", determinism.CPU)
    lines += section("CUDA", determinism.CUDA)
    lines += section("Ascend: collectives", determinism_ascend.COLLECTIVES)
    lines += section("Ascend: kernels", determinism_ascend.KERNELS)
    lines += section("Ascend: what runs with what", determinism_ascend.SCHEDULING)
    lines += section("Ascend: refused", determinism_ascend.REFUSED)
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
