"""Which seed a request runs with. A seed is any int64: 0 and negative ones are seeds like
others.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass
from typing import Any

from server.errors import InvalidRequest


@dataclass(frozen=True, slots=True)
class Seed:
    """The seed in use, and where it came from: request, assigned, fixed; unused when greedy."""

    value: int
    source: str

    def shown(self) -> dict[str, Any]:
        """What the answer says: {"seed": 42, "seed_from": "request"}; a greedy answer has none."""
        used = self.source != "unused"
        return {"seed": self.value if used else None, "seed_from": self.source}

    def headers(self) -> dict[str, str]:
        """`X-Samebits-Seed`: the seed, or "unused" for a greedy answer."""
        return {"X-Samebits-Seed": "unused" if self.source == "unused" else str(self.value)}


def resolve(seed: int | None, *, greedy: bool, policy: str) -> Seed:
    """The seed to run with. `policy` is assign | require | fixed:<int64>.

    Greedy answers take no draw: a seed is accepted and unused. Assigned seeds come from the
    system's randomness, so that no state of the process decides them; they are reported, and the
    same seed sent back repeats the answer. Non-negative, below 2**53: exact in every client.
    """
    if greedy:
        return Seed(0 if seed is None else seed, "unused")
    if seed is not None:
        return Seed(seed, "request")
    if policy == "require":
        raise InvalidRequest(
            "seed is required on this server, or temperature: 0",
            param="seed",
            code="missing_required_parameter",
        )
    if policy.startswith("fixed:"):
        return Seed(int(policy.removeprefix("fixed:")), "fixed")
    return Seed(secrets.randbits(53), "assigned")
