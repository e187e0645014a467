"""A COMMIT that reaches the server after its client gave the connection up: the write is settled, never doubled."""

from __future__ import annotations

import re
import socket
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Self

import pytest

from store import rows
from tests.integration.durability import facts, operations
from tests.integration.durability.scenarios import open_store

if TYPE_CHECKING:
    from tests.conftest import Database

SOCKET = ".s.PGSQL.5432"
DELAY_S = 0.5


class LateProxy:
    """Passes on what a client and the server say; armed, it cuts the next client off at its COMMIT.

    The server gets that COMMIT only a while after the next connection asked for the mark of the last batch.
    """

    def __init__(self, folder: str, server: str) -> None:
        self._server = server
        self._listening = socket.socket(socket.AF_UNIX)
        self._listening.bind(f"{folder}/{SOCKET}")
        self._listening.listen()
        self._armed = threading.Event()
        self._asked = threading.Event()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self.cut = 0
        self._start(self._accept)

    def arm(self) -> None:
        self._armed.set()

    def _start(self, target: object, *arguments: object) -> None:
        assert callable(target)
        thread = threading.Thread(target=target, args=arguments, daemon=True)
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                client, _ = self._listening.accept()
                server = socket.socket(socket.AF_UNIX)
                server.connect(self._server)
                self._ends += [client, server]
                self._start(self._requests, client, server)
                self._start(self._answers, server, client)

    def _requests(self, client: socket.socket, server: socket.socket) -> None:
        with suppress(OSError):
            while data := client.recv(1 << 16):
                if self._armed.is_set() and b"COMMIT" in data:
                    self._armed.clear()
                    self.cut += 1
                    client.shutdown(socket.SHUT_RDWR)
                    assert self._asked.wait(30)
                    threading.Event().wait(DELAY_S)
                    server.sendall(data)
                    return
                server.sendall(data)
                if self.cut and re.search(rb"SELECT workers\.last_batch", data):
                    self._asked.set()
            server.shutdown(socket.SHUT_WR)

    @staticmethod
    def _answers(server: socket.socket, client: socket.socket) -> None:
        with suppress(OSError):
            while data := server.recv(1 << 16):
                client.sendall(data)
            client.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._listening.shutdown(socket.SHUT_RDWR)
        for end in self._ends:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join(timeout=10)
        for end in [*self._ends, self._listening]:
            end.close()


@pytest.mark.databases("postgresql")
async def test_a_commit_that_arrives_after_the_connection_was_given_up_is_waited_for(database: Database):
    found = re.search(r"host=([^&]+)", database.url)
    if found is None or not (Path(found[1]) / SOCKET).exists():
        pytest.skip("NO SOCKET: this server is not on a Unix socket here, a proxy cannot stand before it")
    with (
        tempfile.TemporaryDirectory(prefix="pg") as folder,
        LateProxy(folder, f"{found[1]}/{SOCKET}") as proxy,
    ):
        store = await open_store(database.url.replace(found[1], folder))
        await store.submit([operations.new_rollout("late")])
        (lease,) = await store.claim(limit=1)
        proxy.arm()
        noted = await store.record(lease, [operations.call()])
        await store.close()
    assert proxy.cut == 1
    assert noted == rows.Applied(version=0, state="created")
    assert len(facts.dump(database.url)["llm_calls"]) == 1
