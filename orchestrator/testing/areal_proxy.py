"""AReaL's rollout proxy without AReaL: sessions with a key each, recorded calls, and the same refusals word for word.

Statuses, texts and recording rules are those of `areal/experimental/openai/proxy/proxy_rollout_server.py` at AReaL
cbff54d6; what the model says is a script's.
"""

from __future__ import annotations

import asyncio
import json
import uuid
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Self

from orchestrator.testing.loopback import LoopbackServer, Request, Response
from orchestrator.testing.model_server import commit, completion, turn_of, without_nulls

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from orchestrator.testing.replay import Scenario, Script

_GONE = "Invalid or expired session API key."


@dataclass(slots=True)
class Interaction:
    """One recorded call."""

    id: str
    messages: list[dict[str, Any]]
    answer: dict[str, Any]
    reward: float = 0.0


@dataclass(slots=True)
class Session:
    """One rollout's session."""

    id: str
    key: str
    scenario: Scenario
    interactions: list[Interaction] = field(default_factory=list)
    requests: int = 0
    ended: bool = False
    strikes: dict[int, int] = field(default_factory=dict)
    """Turn -> how often its fault was committed."""

    def leaves(self) -> list[Interaction]:
        """Return the calls that no later call continues: what the style `concat` exports."""

        def continued(one: Interaction) -> bool:
            whole = [*one.messages, without_nulls(one.answer)]
            return any(
                other is not one and other.messages[: len(whole)] == whole for other in self.interactions
            )

        return [one for one in self.interactions if not continued(one)]


class _Refusal(Exception):
    def __init__(self, status: int, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class FakeProxy:
    """Serves sessions: `async with FakeProxy(script) as proxy: key = proxy.session(instance_id)`."""

    def __init__(
        self,
        script: Script,
        *,
        admin_key: str = "admin",
        capacity: int | None = None,
        max_total_tokens: int | None = None,
    ) -> None:
        self.script = script
        self.sessions: dict[str, Session] = {}
        """By key; an exported session is gone."""
        self.admin_key = admin_key
        self.capacity = capacity
        """Sessions that may still be started; None: any number."""
        self.max_total_tokens = max_total_tokens
        self._http = LoopbackServer(self._answer)
        self._names: dict[str, int] = {}
        self._arrived = asyncio.Condition()

    async def __aenter__(self) -> Self:
        await self._http.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.close()

    @property
    def base_url(self) -> str:
        """Its address as AReaL hands it to agents: without `/v1`."""
        return f"http://127.0.0.1:{self._http.port}"

    def session(self, instance_id: str, sample: int = 0) -> str:
        """Start a session whose model plays this sample of this instance; return its key."""
        scenario = self.script.scenario(instance_id, sample)
        if scenario is None:
            raise KeyError(f"the script has no turns for {instance_id}")
        number = self._names[instance_id] = self._names.get(instance_id, -1) + 1
        session = Session(
            id=f"{instance_id}:{sample}-{number}", key=f"sess-{uuid.uuid4().hex}", scenario=scenario
        )
        self.sessions[session.key] = session
        return session.key

    async def wait_for(self, condition: Callable[[FakeProxy], bool]) -> None:
        """Return once the condition holds; it is looked at after every arrival of a call."""
        async with self._arrived:
            await self._arrived.wait_for(lambda: condition(self))

    async def _answer(self, request: Request) -> Response:
        routes = {
            ("GET", "/health"): self._health,
            ("POST", "/grant_capacity"): self._grant,
            ("POST", "/rl/start_session"): self._start,
            ("POST", "/chat/completions"): self._chat,
            ("POST", "/rl/set_reward"): self._reward,
            ("POST", "/rl/end_session"): self._end,
            ("POST", "/export_trajectories"): self._export,
        }
        route = routes.get((request.method, request.path.partition("?")[0]))
        if route is None:
            return _json(404, {"detail": "Not Found"})
        try:
            answered = await route(request)
        except _Refusal as refusal:
            return _json(refusal.status, {"detail": str(refusal)})
        return answered if isinstance(answered, Response) else _json(200, answered)

    async def _health(self, _request: Request) -> dict[str, Any]:
        return {"status": "ok", "initialized": True}

    async def _grant(self, request: Request) -> dict[str, Any]:
        self._admin(request)
        self.capacity = (self.capacity or 0) + 1
        return {"capacity": self.capacity}

    async def _start(self, request: Request) -> dict[str, Any]:
        self._admin(request)
        if self.capacity == 0:
            raise _Refusal(429, "No capacity")
        if self.capacity is not None:
            self.capacity -= 1
        instance_id, _, sample = str(_body(request)["task_id"]).partition(":")
        key = self.session(instance_id, int(sample or 0))
        return {"session_id": self.sessions[key].id, "api_key": key}

    async def _chat(self, request: Request) -> dict[str, Any] | Response:
        session = self._session(request)
        async with self._arrived:
            session.requests += 1
            self._arrived.notify_all()
        payload = self._checked(request)
        messages: list[dict[str, Any]] = payload["messages"]
        number = sum(message.get("role") == "assistant" for message in messages)
        playing = turn_of(session.scenario, number)
        struck = session.strikes[number] = session.strikes.get(number, 0) + 1
        if playing.fault is not None and (playing.fault.times is None or struck <= playing.fault.times):
            response = await commit(playing.fault)
            if response is not None:
                return response
        if self.sessions.get(session.key) is not session:
            raise _Refusal(410, "Session is gone.")
        answer = completion(playing, number, payload) | {
            "id": f"chatcmpl-{uuid.uuid4().hex[:29]}",
            "model": "None",
        }
        if payload.get("store") is not False:
            said = answer["choices"][0]["message"]
            session.interactions.append(Interaction(answer["id"], messages, said))
        return answer

    def _checked(self, request: Request) -> dict[str, Any]:
        payload = _body(request)
        messages = payload.get("messages")
        if messages is None:
            raise _Refusal(422, "Field required: messages")
        if not messages:
            raise _Refusal(500, "ValueError: messages must not be empty")
        if payload.get("n") not in (None, 1):
            raise _Refusal(500, "NotImplementedError: n != 1 is not supported")
        if payload.get("max_tokens") is not None and payload.get("max_completion_tokens") is not None:
            raise _Refusal(500, "ValueError: max_tokens and max_completion_tokens cannot be set both")
        nulls = sum(without_nulls(message) != message for message in messages)
        if nulls:
            raise _Refusal(500, f"{8 * nulls} validation errors for ChatCompletionAssistantMessageParam")
        tokens = len(json.dumps(messages)) // 4
        if self.max_total_tokens is not None and tokens > self.max_total_tokens:
            text = f"len of prompt tokens {tokens} exceeds max_total_tokens {self.max_total_tokens}"
            raise _Refusal(500, f"Streaming setup failed: 500: {text}" if payload.get("stream") else text)
        return payload

    async def _reward(self, request: Request) -> dict[str, Any]:
        session, body = self._session(request), _body(request)
        if not session.interactions:
            raise _Refusal(400, "No interactions in session")
        wanted = body.get("interaction_id") or session.interactions[-1].id
        found = [one for one in session.interactions if one.id == wanted]
        if not found:
            raise _Refusal(400, f"Interaction {wanted} not found")
        found[0].reward = float(body["reward"])
        return {"message": "success"}

    async def _end(self, request: Request) -> dict[str, Any]:
        session = self._session(request)
        session.ended = True
        return {"message": "success", "interaction_count": len(session.interactions)}

    async def _export(self, request: Request) -> dict[str, Any]:
        """Spread the rewards backwards over all calls, return the leaves, and forget session and key."""
        self._admin(request)
        body = _body(request)
        found = [s for s in self.sessions.values() if s.id == body["session_id"]]
        if not found:
            raise _Refusal(404, "Session not found")
        session = found[0]
        del self.sessions[session.key]
        later = 0.0
        for one in reversed(session.interactions):
            one.reward += later * float(body.get("discount", 1.0))
            later = one.reward
        exported = session.leaves() if body.get("style", "concat") == "concat" else session.interactions
        return {
            "interactions": {one.id: {"reward": one.reward, "messages": one.messages} for one in exported}
        }

    def _admin(self, request: Request) -> None:
        if _key(request) != self.admin_key:
            raise _Refusal(403, "Invalid admin API key.")

    def _session(self, request: Request) -> Session:
        session = self.sessions.get(_key(request))
        if session is None:
            raise _Refusal(401, _GONE)
        return session


def _key(request: Request) -> str:
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    return key if scheme.lower() == "bearer" else request.headers.get("x-api-key", "")


def _body(request: Request) -> dict[str, Any]:
    if request.headers.get("content-type", "").partition(";")[0] != "application/json":
        raise _Refusal(422, "Input should be a valid dictionary")
    try:
        body = json.loads(request.body)
    except ValueError:
        raise _Refusal(422, "JSON decode error") from None
    if not isinstance(body, dict):
        raise _Refusal(422, "Input should be a valid dictionary")
    return body


def _json(status: int, content: dict[str, Any]) -> Response:
    return Response(
        status=status, body=json.dumps(content).encode(), headers={"content-type": "application/json"}
    )
