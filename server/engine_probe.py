"""The promise through the engine: one question alone, then under everything that must not show.

Every start asks the short version before it serves, on an accelerator the crowd too; `samebits
check` asks them and the long one. Token ids and the bits of every logprob are compared.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from server.engine import Engine, Prompt, Sampling

Bits = tuple[tuple[int, ...], tuple[str, ...]]
LONG_SIZES = (2, 3, 8, 16, 17, 32, 33, 64, 65, 129)
LENGTHS = (3, 17, 40, 130)  # tokens of the prompts of the long version
CROWD = (5, 1, 17, 64, 3, 33, 90, 2, 129, 8, 40, 24)  # and of the crowd's
CROWD_TOKENS = 8
_numbers = itertools.count()


class Differs(Exception):
    """An answer's bits changed. The message names the condition and the first differing token."""


async def short(engine: Engine) -> None:
    """One seeded prompt alone and with three neighbours. Raises `Differs`."""
    length = min(24, engine.info.max_model_len // 2)
    probe, options = prompt(engine, length, 1), sampling(engine, 3, seeded=True)
    alone = await ask(engine, probe, options)
    beside = [(prompt(engine, 2 + 5 * i, 2 + i), sampling(engine, 3, seeded=i > 0)) for i in (0, 1)]
    together = await _together(engine, [*beside, (probe, options), beside[0]], 2)
    _compare("in a batch of 4", together, alone)


async def crowd(engine: Engine) -> None:
    """A dozen questions, greedy and seeded, alone; then twice together, each arriving while those
    before it are being answered, and strangers among them that leave in the middle. So batches of
    every size up to a dozen, that change from step to step, mix prompts and answers.

    Raises `Differs`.
    """
    room = engine.info.max_model_len - CROWD_TOKENS - 1
    asked = [
        (prompt(engine, max(1, min(room, length)), i), sampling(engine, CROWD_TOKENS, seeded=i % 3))
        for i, length in enumerate(CROWD)
    ]
    alone = [await ask(engine, *one) for one in asked]
    for order in (list(range(len(asked))), list(range(len(asked)))[::-1]):
        tasks = {}
        async with asyncio.TaskGroup() as group:
            for i in order:
                begun = asyncio.Event()
                tasks[i] = group.create_task(ask(engine, *asked[i], begun=begun))
                if i % 4 == 0:
                    stranger = prompt(engine, max(1, min(room, 7 + i)), 50 + i)
                    options = sampling(engine, CROWD_TOKENS, seeded=i % 8)
                    group.create_task(ask(engine, stranger, options, leave_after=3))
                await begun.wait()
        for i, task in tasks.items():
            _compare(f"in a crowd: question {i}", task.result(), alone[i])


async def long(
    engine: Engine, progress: Callable[[int, int], None] = lambda *_: None
) -> dict[str, list[dict[str, object]]]:
    """{probe: [{case, ok, message}]}: probes of several lengths, greedy and seeded, in batches.

    `progress(done, total)` is called after each case.
    """
    room = engine.info.max_model_len - 9
    probes = [
        (f"{'seeded' if seeded else 'greedy'}, {length} tokens", length, seeded)
        for length in LENGTHS
        if length <= room
        for seeded in (False, True)
    ]
    found: dict[str, list[dict[str, object]]] = {}
    total, done = len(probes) * (len(LONG_SIZES) + 3) + 1, 0
    for name, length, seeded in probes:
        one = (prompt(engine, length, 1), sampling(engine, 8, seeded=seeded))
        alone = await ask(engine, *one)
        cases = [("again", 1, 0), *((f"in a batch of {n}", n, n // 2) for n in LONG_SIZES)]
        cases += [("first of 33", 33, 0), ("last of 33", 33, 32)]
        for case, size, place in cases:
            others = [
                (prompt(engine, 1 + i * 7 % min(room, 61), i), sampling(engine, 4, seeded=i % 2))
                for i in range(1, size)
            ]
            bits = await _together(engine, [*others[:place], one, *others[place:]], place)
            message = ""
            try:
                _compare(f"{name}: {case}", bits, alone)
            except Differs as fault:
                message = str(fault)
            found.setdefault(name, []).append({"case": case, "ok": not message, "message": message})
            done += 1
            progress(done, total)
    message = ""
    try:
        await crowd(engine)
    except Differs as fault:
        message = str(fault)
    found["a crowd"] = [{"case": "arriving, leaving", "ok": not message, "message": message}]
    progress(total, total)
    return found


def prompt(engine: Engine, length: int, salt: int) -> Prompt:
    """Token ids that any vocabulary has; another `salt`, other ids."""
    most = engine.info.vocab_size - 3
    return Prompt(tuple((i * i * 7 + 3 * i + 31 * salt) % most + 3 for i in range(length)))


def sampling(engine: Engine, tokens: int, *, seeded: bool | int) -> Sampling:
    """Options of a probe: every token is wanted, with the logprobs beside it."""
    options = Sampling(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, logprobs=min(2, _most(engine))
    )
    return replace(options, temperature=1.0, seed=7) if seeded else options


def _most(engine: Engine) -> int:
    most = engine.info.max_logprobs
    return most if most >= 0 else 2


async def ask(
    engine: Engine, asked: Prompt, options: Sampling, *, begun: asyncio.Event | None = None,
    leave_after: int = 0,
) -> Bits:  # fmt: skip
    """The answer's token ids and the bits of all its logprobs. `begun` is set at its first token,
    or when there is none to come; after `leave_after` tokens the asker is gone.
    """
    ids: list[int] = []
    bits: list[str] = []
    name = f"probe-{next(_numbers)}"
    outputs = engine.generate(asked, options, request_id=name)
    try:
        async with aclosing(outputs):
            async for output in outputs:
                ids += output.token_ids
                for at in output.logprobs or ():
                    bits.append(
                        " ".join(f"{t.token_id}:{t.logprob.hex()}" for t in (at.token, *at.top))
                    )
                if begun is not None:
                    begun.set()
                if 0 < leave_after <= len(ids):
                    break
    finally:
        if begun is not None:
            begun.set()
    return tuple(ids), tuple(bits)


async def _together(
    engine: Engine, requests: Sequence[tuple[Prompt, Sampling]], place: int
) -> Bits:
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask(engine, *request)) for request in requests]
    return tasks[place].result()


def _compare(condition: str, got: Bits, alone: Bits) -> None:
    if got == alone:
        return
    for at, pair in enumerate(
        itertools.zip_longest(zip(*got, strict=True), zip(*alone, strict=True))
    ):
        if pair[0] != pair[1]:
            raise Differs(f"{condition}: token {at}: {pair[0]} instead of {pair[1]}")
    raise Differs(f"{condition}: {got} instead of {alone}")
