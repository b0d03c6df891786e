"""Ed25519 signatures over receipts: who minted one, for those who were not there."""

from __future__ import annotations

import base64
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from server.canonical import encode

ALGORITHM = "Ed25519"
MEMBERS = frozenset({"algorithm", "public_key", "value"})


class BadKey(ValueError):
    """A key file that is missing, unreadable or no Ed25519 key."""


class Signer:
    """Signs receipts with one private key. The signature covers the canonical bytes of all other
    members.
    """

    def __init__(self, key: Ed25519PrivateKey) -> None:
        self._key = key
        raw = key.public_key().public_bytes(
            serialization.Encoding.Raw, serialization.PublicFormat.Raw
        )
        self.public_key = raw.hex()

    @classmethod
    def from_file(cls, path: str | Path) -> Signer:
        """Read an unencrypted PEM (`openssl genpkey -algorithm ed25519`). Raises `BadKey`."""
        try:
            key = serialization.load_pem_private_key(Path(path).read_bytes(), password=None)
        except OSError as fault:
            raise BadKey(f"SAMEBITS_RECEIPTS_KEY_FILE={path}: {fault.strerror}") from None
        except (ValueError, TypeError) as fault:
            raise BadKey(
                f"SAMEBITS_RECEIPTS_KEY_FILE={path}: no unencrypted PEM key ({fault})"
            ) from None
        if not isinstance(key, Ed25519PrivateKey):
            raise BadKey(f"SAMEBITS_RECEIPTS_KEY_FILE={path}: not an Ed25519 key")
        return cls(key)

    def sign(self, receipt: Mapping[str, Any]) -> dict[str, Any]:
        """The receipt with its `signature` member."""
        bare = {key: value for key, value in receipt.items() if key != "signature"}
        value = base64.b64encode(self._key.sign(encode(bare))).decode()
        return {
            **bare,
            "signature": {"algorithm": ALGORITHM, "public_key": self.public_key, "value": value},
        }


def verify(receipt: Mapping[str, Any], public_key: str | None = None) -> str | None:
    """None when the signature holds, else what is wrong. `public_key` (64 hexadecimal digits): the
    one to accept.
    """
    signature = receipt.get("signature")
    if "signature" not in receipt:
        return "not signed"
    if not isinstance(signature, Mapping) or set(signature) != MEMBERS:
        return f"malformed signature (its members are {', '.join(sorted(MEMBERS))})"
    if signature["algorithm"] != ALGORITHM:
        return f"malformed signature (algorithm {signature['algorithm']!r}, not {ALGORITHM})"
    found, value = signature["public_key"], signature["value"]
    if public_key is not None and found != public_key.strip().lower():
        return f"signed with another key ({found})"
    bare = {key: value for key, value in receipt.items() if key != "signature"}
    try:
        raw = base64.b64decode(value, validate=True)
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(found))
        if key.public_bytes_raw().hex() != found or base64.b64encode(raw).decode() != value:
            return "malformed signature (another spelling of the same bytes)"
        key.verify(raw, encode(bare))
    except InvalidSignature:
        return "the signature does not fit: the receipt was edited"
    except (ValueError, KeyError, TypeError, RecursionError) as fault:
        return f"malformed signature ({fault})"
    return None
