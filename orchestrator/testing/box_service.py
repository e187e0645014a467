"""A sandbox service over HTTP on loopback, a process of its own: its sandboxes and their shells outlive every client.

`python -m orchestrator.testing.box_service --folder DIR` prints its port and ends when its standard input closes. It
writes down what it was asked, and by whose fence, in `DIR/oracle.jsonl`, and commits faults by seed.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import contextlib
import json
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs, unquote, urlsplit

from orchestrator import errors, settings
from orchestrator.sandbox.base import Limits, Role, SandboxSpec
from orchestrator.sandbox.local import LocalProvider
from orchestrator.tasks.record import Task
from orchestrator.testing.box_faults import Faults, When
from orchestrator.testing.loopback import LoopbackServer, Request, Response

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Coroutine
    from typing import TextIO

    from orchestrator.sandbox.base import CommandResult
    from orchestrator.sandbox.local_sandbox import LocalSandbox

    Answer = dict[str, Any]
    Handler = Callable[[str, Answer, int], Awaitable[Answer]]

ORACLE = "oracle.jsonl"
FENCE_HEADER = "x-fence"
STATUS = {
    "SandboxCreateFailed": 409,
    "SandboxLost": 410,
    "TaskInvalid": 422,
    "FileNotFoundError": 404,
    "ValueError": 413,
    "OSError": 403,
    "Cancelled": 499,
    "NotServed": 404,
}
"""What an answer may say instead of a result, by `kind`, and its HTTP status."""
_LOGGED = frozenset({"create", "attach", "exec", "write", "stop", "detach", "delete"})
_FORGOTTEN_AFTER = 1000


class Refused(Exception):
    """A call that is answered with an error `kind`."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


class Oracle:
    """The append-only log of what was asked for: the order of arrival is `n`, and a line is there when the call ends."""

    def __init__(self, file: TextIO) -> None:
        self._file = file
        self._arrived = 0

    def arrive(self) -> tuple[int, int]:
        """Return the number of a call and the time in epoch milliseconds."""
        self._arrived += 1
        return self._arrived, time.time_ns() // 1_000_000

    def note(self, arrival: tuple[int, int], op: str, key: str, fence: int, *, ok: bool) -> None:
        """Write one line and flush it; `t_ms` is when the call came, `ms` how long its work took."""
        number, at_ms = arrival
        took_ms = time.time_ns() // 1_000_000 - at_ms
        line = {"n": number, "t_ms": at_ms, "ms": took_ms, "op": op, "key": key, "fence": fence, "ok": ok}
        self._file.write(json.dumps(line) + "\n")
        self._file.flush()


class BoxService:
    """Serves a provider's sandboxes to clients that may die; holds every sandbox itself."""

    def __init__(self, provider: LocalProvider, oracle: Oracle, faults: Faults, *, port: int = 0) -> None:
        self.http = LoopbackServer(self._answer, port)
        self._provider = provider
        self._oracle = oracle
        self._faults = faults
        self._boxes: dict[str, LocalSandbox] = {}
        self._newest: dict[str, int] = {}
        """Key -> highest fence that made or attached it: a detach by an older owner must not end the newer one's shell."""
        self._calls: dict[str, asyncio.Task[Answer]] = {}
        self._cut: deque[str] = deque(maxlen=_FORGOTTEN_AFTER)
        """Calls that were cut off before they arrived."""
        self._late: set[asyncio.Task[None]] = set()
        self._handlers: dict[str, Handler] = {
            "create": self._create,
            "attach": self._attach,
            "shell": self._shell,
            "run": self._run,
            "read": self._read,
            "write": self._write,
            "stop": self._stop,
            "alive": self._alive,
            "detach": self._detach,
            "delete": self._delete,
        }

    async def close(self) -> None:
        """Stop serving, and drop the work that nobody waits for."""
        await self.http.close()
        for late in self._late:
            late.cancel()
        await asyncio.gather(*self._late, return_exceptions=True)

    async def _answer(self, request: Request) -> Response:
        try:
            parts = urlsplit(request.path)
            path = [unquote(part) for part in parts.path.strip("/").split("/")]
            fence = int(request.headers.get(FENCE_HEADER, "0"))
            body: Answer = json.loads(request.body or b"{}")
            match (request.method, path):
                case ("GET", ["health"]):
                    return _json(200, await self._health())
                case ("POST", ["calls", call, "cancel"]):
                    return _json(200, await self._cancel(call))
                case ("GET", ["boxes"]):
                    prefix = parse_qs(parts.query).get("prefix", [""])[0]
                    return await self._with_faults("list", prefix, lambda: self._list(prefix))
                case ("DELETE", ["boxes", key]):
                    return await self._logged("delete", key, body, fence)
                case ("POST", ["boxes", key, str(op)]) if op in self._handlers:
                    return await self._logged(op, key, body, fence)
        except ValueError as e:
            return _refusal(Refused("NotServed", f"no request of this service: {e}"))
        return _refusal(Refused("NotServed", f"nothing is served at {request.method} {request.path}"))

    async def _logged(self, op: str, key: str, body: Answer, fence: int) -> Response:
        arrival = self._oracle.arrive()
        name = "exec" if op in {"shell", "run"} else op

        async def work() -> Answer:
            ok = False
            try:
                answer = await self._handlers[op](key, body, fence)
                ok = True
                return answer
            finally:
                if name in _LOGGED:
                    self._oracle.note(arrival, name, key, fence, ok=ok)

        return await self._with_faults(name, key, work)

    async def _with_faults(
        self, op: str, key: str, work: Callable[[], Coroutine[Any, Any, Answer]]
    ) -> Response:
        fault = self._faults.choose(op, key)
        if fault.status is not None and fault.when is When.INSTEAD:
            return _broken(fault.status)
        if fault.when is When.LATER:
            late = asyncio.create_task(_later(fault.before_s, work))
            self._late.add(late)
            late.add_done_callback(self._late.discard)
            return Response(body=None)
        await asyncio.sleep(fault.before_s)
        try:
            response = _json(200, await work())
        except Refused as e:
            response = _refusal(e)
        except (errors.Failure, OSError, ValueError) as e:
            response = _refusal(_named(e))
        await asyncio.sleep(fault.after_s)
        return response if fault.status is None else _broken(fault.status)

    async def _health(self) -> Answer:
        isolation = await self._provider.preflight()
        return {"isolation": isolation.value, "gaps": list(self._provider.gaps)}

    async def _list(self, prefix: str) -> Answer:
        found = await self._provider.list_ours(prefix)
        return {"instances": [{"key": i.key, "provider_id": i.provider_id} for i in found]}

    async def _create(self, key: str, body: Answer, fence: int) -> Answer:
        box = await self._provider.create(_spec(key, body))
        self._boxes[key] = box
        self._newest[key] = max(fence, self._newest.get(key, 0))
        return _described(box)

    async def _attach(self, key: str, body: Answer, fence: int) -> Answer:
        box = self._boxes.get(key)
        if box is None:  # made by an earlier process of this service
            box = await self._provider.attach(_spec(key, body), str(body["provider_id"]))
            self._boxes[key] = box
        if box.provider_id != body["provider_id"]:
            raise Refused("SandboxLost", f"sandbox {key} is another one than {body['provider_id']}")
        self._newest[key] = max(fence, self._newest.get(key, 0))
        return _described(box)

    async def _shell(self, key: str, body: Answer, _fence: int) -> Answer:
        work = self._box(key).shell(
            body["command"], timeout_s=body["timeout_s"], output_limit=body["output_limit"]
        )
        return await self._cancellable(str(body["call"]), work)

    async def _run(self, key: str, body: Answer, _fence: int) -> Answer:
        work = self._box(key).run(
            body["argv"],
            timeout_s=body["timeout_s"],
            cwd=body["cwd"],
            env=body["env"],
            private=body["private"],
            output_limit=body["output_limit"],
        )
        return await self._cancellable(str(body["call"]), work)

    async def _cancellable(self, call: str, work: Coroutine[Any, Any, CommandResult]) -> Answer:
        """Run a command that `cancel` may cut off; a call that was cut off before it came is not begun."""
        if call in self._cut:
            work.close()
            raise Refused("Cancelled", "the caller gave it up before it began")

        async def result() -> Answer:
            answer = asdict(await work)
            return answer | {"output": base64.b64encode(answer["output"]).decode("ascii")}

        task = self._calls[call] = asyncio.create_task(result())
        try:
            return await task
        except asyncio.CancelledError:
            me = asyncio.current_task()
            if me is not None and me.cancelling():
                raise
            raise Refused("Cancelled", "the caller gave it up") from None
        finally:
            del self._calls[call]

    async def _cancel(self, call: str) -> Answer:
        task = self._calls.get(call)
        if task is None:
            self._cut.append(call)
        else:
            task.cancel()
            await asyncio.wait({task})
        return {}

    async def _read(self, key: str, body: Answer, _fence: int) -> Answer:
        data = await self._box(key).read(body["path"], limit=body["limit"])
        return {"data": base64.b64encode(data).decode("ascii")}

    async def _write(self, key: str, body: Answer, _fence: int) -> Answer:
        await self._box(key).write(body["path"], base64.b64decode(body["data"]), mode=body["mode"])
        return {}

    async def _stop(self, key: str, _body: Answer, _fence: int) -> Answer:
        await self._box(key).stop()
        return {}

    async def _alive(self, key: str, _body: Answer, _fence: int) -> Answer:
        return {"alive": await self._box(key).alive()}

    async def _detach(self, key: str, _body: Answer, fence: int) -> Answer:
        if fence >= self._newest.get(key, 0):
            box = self._box(key)
            del self._boxes[key]  # whoever attaches next gets a shell that goes on where this one ended
            await box.detach()
        return {}

    async def _delete(self, key: str, _body: Answer, _fence: int) -> Answer:
        self._boxes.pop(key, None)
        self._newest.pop(key, None)
        return {"proof": await self._provider.release(key)}

    def _box(self, key: str) -> LocalSandbox:
        box = self._boxes.get(key)
        if box is None:
            raise Refused("SandboxLost", f"there is no sandbox {key}")
        return box


async def _later(pause_s: float, work: Callable[[], Coroutine[Any, Any, Answer]]) -> None:
    await asyncio.sleep(pause_s)
    with contextlib.suppress(Refused, errors.Failure, OSError):  # there is nobody to tell
        await work()


def _spec(key: str, body: Answer) -> SandboxSpec:
    spec = body["spec"]
    return SandboxSpec(
        key=key,
        role=Role(spec["role"]),
        task=Task.model_validate(spec["task"]),
        limits=Limits(**spec["limits"]),
        network=spec["network"],
        ttl_s=spec["ttl_s"],
        create_timeout_s=spec["create_timeout_s"],
    )


def _described(box: LocalSandbox) -> Answer:
    return {
        "provider_id": box.provider_id,
        "isolation": box.isolation.value,
        "workdir": box.workdir,
        "private_dir": box.private_dir,
    }


def _named(error: Exception) -> Refused:
    for kind in (
        errors.SandboxCreateFailed,
        errors.SandboxLost,
        errors.TaskInvalid,
        FileNotFoundError,
        OSError,
        ValueError,
    ):
        if isinstance(error, kind):
            return Refused(kind.__name__, str(error))
    raise error


def _json(status: int, content: Answer) -> Response:
    return Response(status=status, body=json.dumps(content).encode())


def _refusal(refused: Refused) -> Response:
    return _json(STATUS[refused.kind], {"kind": refused.kind, "message": str(refused)})


def _broken(status: int) -> Response:
    """Return what a fault answers: an error status, or with 0 nothing at all."""
    return Response(body=None) if status == 0 else _json(status, {"kind": "Fault", "message": "on purpose"})


async def serve(arguments: argparse.Namespace) -> None:
    """Serve until standard input closes, then remove every sandbox that is left."""
    folder: Path = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    box_settings = settings.SandboxSettings(root=folder / "boxes", allow_no_isolation=True)
    provider = LocalProvider(box_settings, cache_dir=settings.cache_dir())
    await provider.preflight()
    faults = Faults(
        arguments.seed,
        rate=arguments.fault_rate,
        slow_ms=arguments.slow_ms,
        most_per_owner=arguments.most_faults,
    )
    with (folder / ORACLE).open("a", encoding="utf-8") as file:
        service = BoxService(provider, Oracle(file), faults, port=arguments.port)
        await service.http.open()
        try:
            sys.stdout.write(f"{service.http.port}\n")
            sys.stdout.flush()
            await asyncio.to_thread(sys.stdin.buffer.read)
        finally:
            await service.close()
            for left in await provider.list_ours(""):
                await provider.release(left.key)
            await provider.close()


def main() -> None:
    """Read the command line and serve."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True, help="where sandboxes and the oracle's log lie")
    parser.add_argument("--port", type=int, default=0, help="0: any free one")
    parser.add_argument("--seed", type=int, default=0, help="of the faults")
    parser.add_argument("--fault-rate", type=float, default=0.0, help="share of the calls that fail")
    parser.add_argument("--slow-ms", type=int, default=0, help="the most that a slow call is held up")
    parser.add_argument(
        "--most-faults", type=int, default=2, help="for the calls about one owner's sandboxes"
    )
    asyncio.run(serve(parser.parse_args()))


if __name__ == "__main__":
    main()
