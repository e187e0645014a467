from __future__ import annotations

import re
import uuid

from orchestrator import identity


def test_a_rollout_id_is_a_uuid_of_version_7_that_carries_its_time():
    made = uuid.UUID(identity.uuid7(1_700_000_000_123, bytes(range(10))))
    assert (made.version, made.variant) == (7, uuid.RFC_4122)
    assert made.int >> 80 == 1_700_000_000_123


def test_later_ids_sort_behind_earlier_ones():
    assert identity.uuid7(1, b"\xff" * 10) < identity.uuid7(2, b"\0" * 10)


def test_a_sandbox_key_is_a_legal_label_that_names_store_rollout_fence_and_ordinal():
    rollout = identity.uuid7(1_700_000_000_123, bytes(10))
    key = identity.sandbox_key("0123456789abcdef", rollout, 12345, 67)
    assert len(key) <= 63
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", key)
    assert key.startswith(identity.sandbox_prefix("0123456789abcdef"))
    assert identity.is_sandbox_key(key)
    assert key.endswith("-12345-67")


def test_samples_retries_and_runs_have_different_keys():
    keys = {
        identity.batch_key("run", "a", "t", 0, 0),
        identity.batch_key("run", "a", "t", 1, 0),
        identity.batch_key("run", "a", "t", 0, 1),
        identity.batch_key("run.2", "a", "t", 0, 0),
        identity.batch_key("run", "b", "t", 0, 0),
    }
    assert len(keys) == 5
