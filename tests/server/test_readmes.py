"""The two front pages say the same: headings, commands, tables and links, in the same order."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from config.settings import DEMO_MODEL, PREFIX, Settings
from server import cli

ROOT = Path(__file__).parents[2]
ENGLISH = (ROOT / "README.md").read_text(encoding="utf-8")
CHINESE = (ROOT / "README.zh-CN.md").read_text(encoding="utf-8")


def headings(page: str) -> list[int]:
    """Levels of the headings, code blocks left out; the words are in two languages."""
    bare = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    return [len(marks) for marks in re.findall(r"^(#+) ", bare, flags=re.M)]


def blocks(page: str) -> list[str]:
    """Code blocks with their language; comments of a shell are in two languages too."""
    found = re.findall(r"^```(.*?)^```$", page, flags=re.M | re.S)
    return [re.sub(r"\s+# .*$", "", block, flags=re.M).strip() for block in found]


def commands(page: str) -> set[str]:
    """Everything between single backticks that is not an ordinary word: names, paths, commands."""
    bare = re.sub(r"^```.*?^```$", "", page, flags=re.M | re.S)
    return set(re.findall(r"`([^`\n]+)`", bare))


def rows(page: str) -> list[str]:
    """First cells of all tables that hold a code or a number."""
    return re.findall(r"^\| (\d+) \|", page, flags=re.M)


def links(page: str) -> set[str]:
    return set(re.findall(r"\]\(([^)]+)\)", page))


def test_headings() -> None:
    assert headings(ENGLISH) == headings(CHINESE)
    assert headings(ENGLISH)[0] == 1 and len(headings(ENGLISH)) > 4


def test_code_blocks() -> None:
    assert blocks(ENGLISH) == blocks(CHINESE)


def test_names_and_commands_in_the_text() -> None:
    assert commands(ENGLISH) == commands(CHINESE)


def test_exit_codes() -> None:
    assert rows(ENGLISH) == rows(CHINESE) == ["0", "1", "2", "3"]


def unknown_words(page: str) -> list[str]:
    """Commands in a page's shell blocks and in its text that this project doesn't have: targets
    of make, settings, commands and flags of samebits.
    """
    shell = re.findall(r"^```sh$(.*?)^```$", page.replace("\\\n", ""), flags=re.M | re.S)
    lines = [re.sub(r"\s+# .*$", "", line) for block in shell for line in block.splitlines()]
    targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), flags=re.M)
    wrong = []
    for line in [*lines, *sorted(commands(page))]:
        words = shlex.split(line) if line.count("'") % 2 == 0 else []
        while words and re.fullmatch(r"[A-Z_]+=.*", words[0]):
            name = words.pop(0).partition("=")[0]
            if name.startswith(PREFIX) and name.removeprefix(PREFIX).lower() not in FIELDS:
                wrong.append(name)
        if words[:1] == ["make"] and words[1] not in targets:
            wrong.append(line)
        if (
            words
            and words[0].rpartition("/")[2] == "samebits"
            and words[1:]
            and not taken(words[1:])
        ):
            wrong.append(line)
    return wrong


FIELDS = frozenset(Settings.model_fields)


def taken(words: list[str]) -> bool:
    """Whether the command line understands these words."""
    try:
        args, unknown = cli._parser(words[0]).parse_known_args(words)
    except SystemExit as end:
        return end.code == 0  # --help
    return not unknown and bool(args)


def test_commands_exist(capsys: pytest.CaptureFixture[str]) -> None:
    assert unknown_words(ENGLISH) == unknown_words(CHINESE) == []
    assert f'"{DEMO_MODEL}"' in ENGLISH
    for old, new in [
        ("make serve    #", "make server    #"),
        ("SAMEBITS_RECEIPTS=", "SAMEBITS_RECEIPT="),
        ("--max-num-seqs 3", "--max-num-seq 3"),
        ("samebits fingerprint --diff", "samebits fingerprint --dif"),
        ("samebits doctor", "samebits docter"),
        ("samebits serve --help", "samebits server --help"),
    ]:
        assert old in ENGLISH and unknown_words(ENGLISH.replace(old, new)) != [], new
    capsys.readouterr()


def test_links() -> None:
    """Each names the other, and the Chinese page may add pages in Chinese."""
    assert links(ENGLISH) - links(CHINESE) == {"README.zh-CN.md"}
    extra = links(CHINESE) - links(ENGLISH)
    assert "README.md" in extra and all(x == "README.md" or "zh-CN" in x for x in extra)
    for link in links(ENGLISH) | links(CHINESE):
        assert (ROOT / link.partition("#")[0]).exists(), link


@pytest.mark.parametrize(
    ("old", "new", "reader"),
    [
        ("max_tokens=100", "max_tokens=10", blocks),
        ("## ", "### ", headings),
        ("`VLLM_BATCH_INVARIANT=0`", "`VLLM_BATCH_INVARIANT=1`", commands),
        ("| 3 |", "| 4 |", rows),
        ("docs/gpu.md", "docs/npu.md", links),
    ],
)
def test_a_page_that_went_its_own_way_is_seen(old: str, new: str, reader) -> None:  # type: ignore[no-untyped-def]
    assert old in CHINESE and reader(CHINESE.replace(old, new)) != reader(CHINESE)


def test_chinese_page_is_in_chinese() -> None:
    """A paragraph left in English would pass the rest."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`|\([^)]*\)", "", CHINESE, flags=re.M | re.S)
    for line in prose.splitlines():
        words = re.findall(r"[A-Za-z]{3,}", line)
        han = re.findall(r"[一-鿿]", line)
        assert len(words) <= 8 or len(han) >= len(words), line
