"""Sandboxes of the box service as a provider: a backend over a network, whose sandboxes outlive the worker."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import subprocess
import sys
import uuid
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

import httpx

from orchestrator import errors
from orchestrator.sandbox.base import CommandResult, Instance, Isolation
from orchestrator.testing.box_service import FENCE_HEADER

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from orchestrator.sandbox.base import SandboxSpec

_CONNECT_S = 10.0
_ANSWER_S = 30.0
"""How long an answer may take beyond the work that was asked for."""
_RAISED: dict[str, type[Exception]] = {
    "SandboxCreateFailed": errors.SandboxCreateFailed,
    "TaskInvalid": errors.TaskInvalid,
    "FileNotFoundError": FileNotFoundError,
    "ValueError": ValueError,
    "OSError": OSError,
}
"""What an answer's `kind` becomes here; everything else means that the sandbox or the service is lost."""


class _Line:
    """One pool of connections to a service; nothing is ever sent twice."""

    def __init__(self) -> None:
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=8)
        self._client = httpx.AsyncClient(
            trust_env=False, limits=limits, transport=httpx.AsyncHTTPTransport(retries=0, limits=limits)
        )

    async def ask(
        self, method: str, url: str, body: Mapping[str, Any] | None = None, *, fence: int, work_s: float
    ) -> dict[str, Any]:
        """Return the answer; raises what it says, or `errors.SandboxLost` when there is none."""
        try:
            response = await self._client.request(
                method,
                url,
                content=None if body is None else json.dumps(body).encode(),
                headers={FENCE_HEADER: str(fence)},
                timeout=httpx.Timeout(_ANSWER_S, connect=_CONNECT_S, read=work_s + _ANSWER_S),
            )
            answer: dict[str, Any] = response.json()
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as e:
            raise errors.SandboxLost(f"{method} {url}: no answer: {e!r}") from e
        if response.status_code == httpx.codes.OK:
            return answer
        kind = _RAISED.get(str(answer.get("kind")), errors.SandboxLost)
        raise kind(f"{method} {url}: {response.status_code}: {answer.get('message')}")

    async def close(self) -> None:
        await self._client.aclose()


class RemoteSandbox:
    """See `base.Sandbox`; made by `RemoteProvider` only. Its shell lives in the service."""

    def __init__(
        self, spec: SandboxSpec, url: str, said: Mapping[str, Any], calls: _Line, side: _Line
    ) -> None:
        self.key = spec.key
        self.provider_id = str(said["provider_id"])
        self.isolation = Isolation(said["isolation"])
        self.workdir = str(said["workdir"])
        self.private_dir = str(said["private_dir"])
        self._url = url
        self._address = url.rsplit("/boxes/", 1)[0]
        self._fence = fence_of(spec)
        self._calls = calls
        self._side = side

    async def shell(self, command: str, *, timeout_s: float, output_limit: int = 1_000_000) -> CommandResult:
        """See `base.Sandbox.shell`."""
        body = {"command": command, "timeout_s": timeout_s, "output_limit": output_limit}
        return await self._execute("shell", body, timeout_s)

    async def run(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float,
        cwd: str | None = None,
        env: Mapping[str, str] | None = None,
        private: bool = False,
        output_limit: int = 1_000_000,
    ) -> CommandResult:
        """See `base.Sandbox.run`."""
        body = {
            "argv": list(argv),
            "timeout_s": timeout_s,
            "cwd": cwd,
            "env": None if env is None else dict(env),
            "private": private,
            "output_limit": output_limit,
        }
        return await self._execute("run", body, timeout_s)

    async def _execute(self, op: str, body: dict[str, Any], timeout_s: float) -> CommandResult:
        """Run a command; one that is cut off here is ended there before the cancellation goes on."""
        call = uuid.uuid4().hex
        try:
            answer = await self._ask(self._calls, op, {**body, "call": call}, timeout_s)
        except asyncio.CancelledError:
            await asyncio.shield(asyncio.ensure_future(self._cut_off(call)))
            raise
        return CommandResult(**{**answer, "output": base64.b64decode(answer["output"])})

    async def _cut_off(self, call: str) -> None:
        with contextlib.suppress(
            errors.SandboxLost
        ):  # a service that does not answer runs nothing we could end
            await self._side.ask("POST", f"{self._address}/calls/{call}/cancel", fence=self._fence, work_s=0)

    async def read(self, path: str, *, limit: int = 64 * 1024 * 1024) -> bytes:
        """See `base.Sandbox.read`."""
        answer = await self._ask(self._calls, "read", {"path": path, "limit": limit})
        return base64.b64decode(answer["data"])

    async def write(self, path: str, data: bytes, *, mode: int = 0o644) -> None:
        """See `base.Sandbox.write`."""
        text = base64.b64encode(data).decode("ascii")
        await self._ask(self._calls, "write", {"path": path, "data": text, "mode": mode})

    async def stop(self) -> None:
        """See `base.Sandbox.stop`."""
        await self._ask(self._calls, "stop", {})

    async def alive(self) -> bool:
        """See `base.Sandbox.alive`."""
        try:
            return bool((await self._ask(self._calls, "alive", {}))["alive"])
        except errors.SandboxLost:
            return False

    async def detach(self) -> None:
        """See `base.Sandbox.detach`: ends the shell; one that a newer owner attached to is left alone."""
        with contextlib.suppress(errors.SandboxLost):  # gone, and everything in it
            await self._ask(self._side, "detach", {})

    async def _ask(
        self, line: _Line, op: str, body: Mapping[str, Any], work_s: float = 30.0
    ) -> dict[str, Any]:
        return await line.ask("POST", f"{self._url}/{op}", body, fence=self._fence, work_s=work_s)


class RemoteProvider:
    """See `base.SandboxProvider`. `address` is where a box service listens: it is the authority, and its name."""

    name = "remote-test"
    creates_late = True
    """A create call that was cut off may still take effect."""

    def __init__(self, address: str) -> None:
        self._address = address.rstrip("/")
        self._calls = _Line()
        self._side = _Line()
        """For what settles things: it must not wait behind commands that hang."""
        self._gaps: tuple[str, ...] = ()

    @property
    def ref(self) -> str:
        """See `base.SandboxProvider.ref`."""
        return self._address

    @property
    def gaps(self) -> tuple[str, ...]:
        """See `base.SandboxProvider.gaps`."""
        return self._gaps

    async def preflight(self) -> Isolation:
        """See `base.SandboxProvider.preflight`."""
        answer = await self._side.ask("GET", f"{self._address}/health", fence=0, work_s=_ANSWER_S)
        self._gaps = tuple(answer["gaps"])
        return Isolation(answer["isolation"])

    async def create(self, spec: SandboxSpec) -> RemoteSandbox:
        """See `base.SandboxProvider.create`. Without an answer the sandbox may exist, or come to exist later."""
        try:
            return await self._take(spec, "create", {})
        except errors.SandboxLost as e:
            raise errors.SandboxCreateFailed(f"sandbox {spec.key} could not be made: {e}") from e

    async def attach(self, spec: SandboxSpec, provider_id: str) -> RemoteSandbox:
        """See `base.SandboxProvider.attach`."""
        return await self._take(spec, "attach", {"provider_id": provider_id})

    async def _take(self, spec: SandboxSpec, op: str, more: Mapping[str, Any]) -> RemoteSandbox:
        url = _box_url(self._address, spec.key)
        body = {"spec": _wire(spec), **more}
        said = await self._calls.ask(
            "POST", f"{url}/{op}", body, fence=fence_of(spec), work_s=spec.create_timeout_s
        )
        return RemoteSandbox(spec, url, said, self._calls, self._side)

    async def release(self, key: str, ref: str | None = None) -> str:
        """See `base.SandboxProvider.release`: the proof is a list that was taken after the delete was confirmed."""
        address = self._address if ref is None else ref
        await self._side.ask("DELETE", _box_url(address, key), fence=0, work_s=_ANSWER_S)
        if any(left.key == key for left in await self.list_ours(key, address)):
            raise errors.SandboxLost(f"sandbox {key} is deleted, but {address} still lists it")
        return f"{address}: deleted, and its list after that has no {key}"

    async def list_ours(self, prefix: str, ref: str | None = None) -> list[Instance]:
        """See `base.SandboxProvider.list_ours`."""
        address = self._address if ref is None else ref
        url = f"{address}/boxes?prefix={quote(prefix, safe='')}"
        answer = await self._side.ask("GET", url, fence=0, work_s=0)
        return [Instance(key=i["key"], provider_id=i["provider_id"]) for i in answer["instances"]]

    async def close(self) -> None:
        """See `base.SandboxProvider.close`."""
        await self._calls.close()
        await self._side.close()


def fence_of(spec: SandboxSpec) -> int:
    """Return the fence of whoever asks."""
    return int(getattr(spec, "fence", 0))


def _box_url(address: str, key: str) -> str:
    return f"{address}/boxes/{quote(key, safe='')}"


def _wire(spec: SandboxSpec) -> dict[str, Any]:
    return {
        "role": spec.role.value,
        "task": spec.task.model_dump(mode="json"),
        "limits": asdict(spec.limits),
        "network": spec.network,
        "ttl_s": spec.ttl_s,
        "create_timeout_s": spec.create_timeout_s,
    }


@contextlib.contextmanager
def box_service(folder: Path, *options: str) -> Iterator[str]:
    """Run a box service on `folder` with these command-line options; yields its address.

    At the end it removes the sandboxes that are left, within a minute.
    """
    argv = [sys.executable, "-m", "orchestrator.testing.box_service", "--folder", str(folder), *options]
    process = subprocess.Popen(argv, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        port = process.stdout.readline().strip() if process.stdout else b""
        if not port:
            raise RuntimeError("the box service did not start")
        yield f"http://127.0.0.1:{int(port)}"
    finally:
        try:
            process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            raise
