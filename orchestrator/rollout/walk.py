"""One rollout under one lease, from the state it is in to the end. Each method is one state."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, assert_never

from orchestrator import errors
from orchestrator.agents.base import AgentRun, AgentTask
from orchestrator.rollout import custody, grades, takeover, transcript
from orchestrator.rollout.owned import OwnedSandbox
from orchestrator.rollout.stored_input import StoredInput
from orchestrator.sandbox.base import Role
from orchestrator.states import TERMINAL, State
from orchestrator.steps import agent_running, sandbox_ready
from orchestrator.tasks.record import Task
from store import failpoints, rows

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from orchestrator.agents.base import Endpoint, LlmCall, Step
    from orchestrator.rollout.runtime import Runtime
    from orchestrator.sandbox.base import Sandbox, SandboxSpec
    from orchestrator.settings import Settings
    from store.history import Record

_LOOK_S = 0.05
"""How often an owner who is not sure looks whether its lease was renewed."""


class Superseded(Exception):
    """Somebody else owns the rollout, or it is over: stop and touch nothing of it."""


class ReleasePending(Exception):
    """Graded, but a sandbox could not be proven gone: the release is tried again later."""


class Walk:
    """The state of one walk in memory; changes only after the store has applied the same change."""

    def __init__(
        self, runtime: Runtime, lease: rows.Lease, row: Record, task: Task, settings: Settings
    ) -> None:
        self.runtime = runtime
        self.lease = lease
        self.row = row
        self.task = task
        self.settings = settings
        self.state = State(lease.state)
        self._version = lease.version
        self._sandbox: Sandbox | None = None
        self._base_commit = ""
        self._steps: Sequence[Step] = ()
        """Durable steps of the agent that an earlier owner ran."""
        self._ends_at: float | None = None
        self._writing: asyncio.Future[None] | None = None
        self._asked = False

    @property
    def left_s(self) -> float | None:
        """Seconds until a caller who waits must be answered; None when nobody waits."""
        return None if self._ends_at is None else self._ends_at - self.runtime.elapsed()

    @property
    def agent_left_s(self) -> float:
        """Seconds that the agent may still work: its own limit, within what grading and release leave of the deadline."""
        own, limits = self.settings.agent.timeout_s, self.settings.limits
        return own if self.left_s is None else min(own, self.left_s - limits.grade_s - limits.release_s)

    @classmethod
    async def load(cls, runtime: Runtime, lease: rows.Lease) -> Walk:
        """Rebuild task and settings from the stored rollout; raises what `driver.UNREADABLE` names if that cannot be."""
        row = await runtime.store.history.rollout(lease.rollout_id)
        if row is None:
            raise errors.InternalError(f"rollout {lease.rollout_id} has no row")
        record = await runtime.store.history.task_json(row["task_sha256"])
        task = await asyncio.to_thread(Task.model_validate_json, record)  # which takes long for some
        given = StoredInput(row)
        if given.repo_source is not None:
            task = task.model_copy(update={"repo_source": given.repo_source})
        walk = cls(runtime, lease, row, task, given.settings)
        if row["deadline_at"] is not None and runtime.serves_sessions:
            left_ms = row["deadline_at"] - await runtime.store.history.now()
            walk._ends_at = runtime.elapsed() + left_ms / 1000
        return walk

    async def to_the_end(self) -> None:
        """Do the work of each state until the rollout is released; raises a `Failure`, `Superseded`, `ReleasePending`."""
        left = await takeover.settle(self)
        if left is not None:
            self._sandbox, self._base_commit, self._steps = left.sandbox, left.base_commit, left.steps
        while self.state not in TERMINAL:
            match self.state:
                case State.CREATED:
                    await self._provision()
                case State.SANDBOX_READY:
                    await self._start_agent()
                case State.AGENT_RUNNING:
                    await self._run_agent()
                case State.PATCHED:
                    await self._grade()
                case State.GRADED:
                    await self._release()
                case State.RELEASED | State.FAILED:
                    return
                case _:
                    assert_never(self.state)

    async def move(
        self,
        trigger: str,
        *,
        payload: dict[str, Any] | None = None,
        extra: Sequence[rows.Row] = (),
        give_back: rows.GiveBack | None = None,
        failure: tuple[str, str] | None = None,
    ) -> None:
        """Make one durable transition; memory follows only when it was applied."""
        op_id = self.runtime.new_id()
        await self._write(
            lambda lease: self.runtime.store.transition(
                lease,
                trigger,
                op_id=op_id,
                payload=payload,
                extra=extra,
                give_back=give_back,
                failure=failure,
            )
        )
        self.runtime.on_move(self.lease.rollout_id, self.state)

    async def note(
        self,
        extra: Sequence[rows.Row] = (),
        *,
        spend: str | None = None,
        give_back: rows.GiveBack | None = None,
    ) -> None:
        """Store evidence without a transition."""
        await self._write(
            lambda lease: self.runtime.store.record(lease, extra, spend=spend, give_back=give_back)
        )

    async def _write(self, write: Callable[[rows.Lease], Awaitable[rows.Outcome]]) -> None:
        """Make one write. A cancelled caller does not withdraw it: `caught_up` then tells what it did."""
        self._writing = asyncio.ensure_future(self._written(write))
        self._writing.add_done_callback(lambda done: done.cancelled() or done.exception())
        await asyncio.shield(self._writing)

    async def caught_up(self) -> None:
        """Wait for the write that a cancellation left behind, so that state and version are the store's again."""
        if self._writing is not None:
            await asyncio.wait([self._writing])

    async def _written(self, write: Callable[[rows.Lease], Awaitable[rows.Outcome]]) -> None:
        """Write under the lease; one that ran out is taken back first, if nobody claimed the rollout meanwhile."""
        outcome = await write(self._current_lease())
        if isinstance(outcome, rows.LeaseExpired) and await self.runtime.store.reacquire(self.lease):
            outcome = await write(self._current_lease())
        self._follow(outcome)

    async def asking(self) -> None:
        """Store that a caller's session is asked (see `agents.base.Recorder`); another endpoint forgets each request."""
        if self.row["endpoint_kind"] == "session" and not self._asked:
            await self.note([rows.Asked()])
            self._asked = True

    async def answered(self, step: str, calls: list[LlmCall]) -> None:
        """Store the calls of a step (see `agents.base.Recorder`)."""
        await self.note(transcript.call_rows(step, calls))

    async def record(self, step: Step) -> None:
        """Store a completed step (see `agents.base.Recorder`)."""
        await self.note([transcript.step_row(step)])

    async def make_sandbox(self, spec: SandboxSpec) -> Sandbox:
        """Write the intent down, then make the sandbox."""
        asked_s = self.runtime.elapsed()
        await self.note([custody.intent_of(self.runtime, spec)])
        if self.runtime.elapsed() - asked_s >= spec.create_timeout_s:
            raise errors.SandboxCreateFailed(
                f"the time to make sandbox {spec.key} was over before it began: this process stood still"
            )
        await self.sure()
        return OwnedSandbox(await custody.make(self.runtime, spec), self.sure)

    async def sure(self) -> None:
        """Wait until nobody else can have claimed the rollout; once somebody has, the heartbeat ends the walk here.

        A process that stood still, or whose store is away, waits for its next renewal.
        """
        while not self.runtime.heartbeat.is_sure(self.lease):
            await asyncio.sleep(_LOOK_S)

    @asynccontextmanager
    async def kept(self, sandbox: Sandbox) -> AsyncIterator[None]:
        """Remove a new sandbox at once when the rollout turns out to be somebody else's: its ledger row may be closed."""
        try:
            yield
        except Superseded:
            await custody.discard(self.runtime, sandbox.key)
            raise

    async def let_go(self) -> None:
        """End what runs in the task sandbox and drop local resources."""
        if self._sandbox is not None:
            sandbox, self._sandbox = self._sandbox, None
            await sandbox.detach()

    def _current_lease(self) -> rows.Lease:
        lease = self.lease
        return rows.Lease(
            rollout_id=lease.rollout_id,
            fence=lease.fence,
            attempt_no=lease.attempt_no,
            version=self._version,
            state=self.state.value,
            previous=lease.previous,
        )

    def _follow(self, outcome: rows.Outcome) -> None:
        match outcome:
            case rows.Applied() | rows.AlreadyApplied():
                self._version, self.state = outcome.version, State(outcome.state)
            case rows.LeaseLost() | rows.LeaseExpired() | rows.Terminal():
                raise Superseded(f"rollout {self.lease.rollout_id}: {outcome}")
            case rows.Cancelled():
                raise errors.RolloutCancelled("a person asked to cancel the rollout")
            case rows.VersionConflict():
                raise errors.InternalError(f"two writers inside one owner: {outcome}")
            case _:
                assert_never(outcome)

    async def _provision(self) -> None:
        spec = await custody.next_spec(self.runtime, self.lease, Role.TASK, self.task, self.settings)
        self._sandbox = await self.make_sandbox(spec)
        async with self.kept(self._sandbox):
            await self.move(
                "provision", payload={"sandbox": spec.key}, extra=[custody.live_of(self._sandbox)]
            )

    async def _start_agent(self) -> None:
        self._refuse_late()
        self._base_commit = await sandbox_ready.prepare(self.task, self._task_sandbox())
        endpoint = self._endpoint()
        await self.move(
            "start_agent",
            payload={
                "agent": self.settings.agent.type,
                "model": endpoint.model,
                "base_url": endpoint.base_url,
                "base_commit": self._base_commit,
            },
        )

    def _refuse_late(self) -> None:
        if self.agent_left_s <= 0:
            raise errors.RolloutCancelled(
                f"its deadline of {self.settings.limits.deadline_s:g} s leaves no time for the agent: making the sandbox"
                " took too long",
                hint="raise limits.deadline_s, and the caller's own timeout with it",
            )

    async def _run_agent(self) -> None:
        self._refuse_late()
        sandbox = self._task_sandbox()
        run = AgentRun(
            task=AgentTask(
                instance_id=self.task.instance_id,
                problem_statement=self.task.problem_statement,
                workdir=sandbox.workdir,
            ),
            sandbox=sandbox,
            endpoint=self._endpoint(),
            settings=self.settings.agent.model_copy(update={"timeout_s": self.agent_left_s}),
            recorder=self,
            monotonic=self.runtime.monotonic,
            history=list(self._steps),
            is_ours=lambda: self.runtime.heartbeat.is_sure(self.lease),
        )
        finished = await agent_running.work(run, self.settings.llm, self._base_commit, self.settings.grading)
        failpoints.hit("agent.after_extract")
        patch = finished.patch
        artifact = await asyncio.to_thread(rows.Artifact.of, patch.data)
        stored = rows.PatchRow(
            artifact=artifact,
            base_commit=patch.base_commit,
            exit_reason=finished.exit.reason.value,
            exit_message=finished.exit.message,
            insertions=patch.insertions,
            deletions=patch.deletions,
            paths=patch.paths,
            notes=patch.notes,
        )
        await self.move(
            "take_patch",
            payload={"exit_reason": finished.exit.reason.value, "patch_sha256": artifact.sha256},
            extra=[stored, rows.SandboxReleasing(key=sandbox.key)],
        )
        await self.let_go()
        await self.release_given_up()

    async def release_given_up(self) -> None:
        """Release what is marked `releasing`: beside the walk where somebody sees to it, else now."""
        await self.runtime.later(custody.release_given_up(self.runtime, self.lease.rollout_id))

    async def _grade(self) -> None:
        await grades.settle(self)

    async def _release(self) -> None:
        if await custody.still_kept(self.runtime, self.lease.rollout_id):
            await self.note([rows.SandboxReleasing()])
        left = await custody.release_given_up(self.runtime, self.lease.rollout_id)
        if left:
            raise ReleasePending(f"not proven gone yet: {', '.join(left)}")
        await self.move("release")

    def _task_sandbox(self) -> Sandbox:
        if self._sandbox is None:
            raise errors.InternalError(f"rollout {self.lease.rollout_id} is {self.state} without a sandbox")
        return self._sandbox

    def _endpoint(self) -> Endpoint:
        return self.runtime.endpoint_of(self.row, self.settings)
