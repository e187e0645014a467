"""What the crash tests share: the server that forks the processes to be killed."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.integration.durability.forking import ForkServer

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="session")
def forks() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server
