"""Who is who: rollout ids that sort by time, keys that make a repeated request the same rollout, sandbox keys."""

from __future__ import annotations

import getpass
import hashlib
import os
import re
from uuid import UUID

_KEY = re.compile(r"rw-[0-9a-f]{8}-[0-9a-f]{32}-\d+-\d+")


def user() -> str:
    """Return who runs this process; a container may give it a number that has no name."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return f"uid-{os.getuid()}"


def uuid7(epoch_ms: int, random: bytes) -> str:
    """Return a UUID version 7 (RFC 9562, section 5.7) from a time and at least 10 random bytes."""
    raw = epoch_ms.to_bytes(6, "big") + random[:10]
    value = int.from_bytes(raw, "big")
    value = value & ~(0xF << 76) | (0x7 << 76)
    value = value & ~(0x3 << 62) | (0x2 << 62)
    return str(UUID(int=value))


def batch_key(run: str, instance_id: str, task_sha256: str, sample: int, retry_no: int) -> str:
    """Return the idempotency key of one sample of a batch run."""
    parts = "\0".join(["batch", run, instance_id, task_sha256, str(sample), str(retry_no)])
    return hashlib.sha256(parts.encode()).hexdigest()


def request_sha256(task_sha256: str, settings_json: str, endpoint_kind: str) -> str:
    """Return the digest of everything a repeated request must agree in."""
    return hashlib.sha256(f"{task_sha256}\0{settings_json}\0{endpoint_kind}".encode()).hexdigest()


def sandbox_key(store_uuid: str, rollout_id: str, fence: int, ordinal: int) -> str:
    """Return our name of a sandbox: names its store and rollout, legal as a k8s label (at most 63 characters)."""
    return f"{sandbox_prefix(store_uuid)}{rollout_id.replace('-', '')}-{fence}-{ordinal}"


def sandbox_prefix(store_uuid: str) -> str:
    """Return how every sandbox key of a store begins."""
    return f"rw-{store_uuid.replace('-', '')[:8]}-"


def is_sandbox_key(text: str) -> bool:
    """Say whether a name has the form of our sandbox keys."""
    return _KEY.fullmatch(text) is not None
