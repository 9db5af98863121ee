"""Several membership machines, one store and one clock in a single thread, driven by a script.

The machines are the real ones. The store is a few dictionaries with revisions that follow the
rules of `Coord`; processes exist only as names. Answers are delivered in the order in which they
were caused, at once, unless the store is on hold. Used by the transcripts and by unit tests; it
holds no rule of its own about who should be in a World.

Script, one command per line (`#` begins a comment):
    config nodes=1:1 slots=2 ...          settings, before the first start
    start a                               agent a begins; its fork server and session answer
    ready a.0 a.1                         these workers have built their models
    formed [g]                            every living worker of the World completes an agreement
    progress [a.0 ...] step=5 [phase=compute]   these (or all) workers of the World are at that step
    watch 5 step=5 a.0=exchange ...       agents look at pages every 0.25 s for so long: workers are
                                          in these phases of the next step; `compute!` never renews
    pause 60                              time passes in which nobody looks or is woken
    die a.0 [signal=9 | code=1]           a process ends, seen by its agent
    freeze a.0 / thaw a.0                 SIGSTOP, SIGCONT
    fail a.0 ValueError text step=7 [kind=user]
    broken a.0                            its collective failed without a known death
    finish a.0 ... | finish all           train returned
    signal a TERM|INT [now]               somebody wants an end; `job a` means the whole job
    crash a                               the agent and its workers are gone, its lease with them
    lapse a                               its lease runs out, though it lives
    hold / release                        the store does not answer / answers all that waited
    cut a / mend a                        the same for one agent alone
    forget                                the store goes on, all members gone (a later attempt)
    advance 1.5                           time passes; machines are woken when they asked for it
"""

from __future__ import annotations

import signal
from collections import deque
from dataclasses import dataclass, field

from elastic.membership import commands as c
from elastic.membership import machine
from elastic.membership.choose_world import WorldRules
from elastic.membership.messages import Member, Snapshot, World
from elastic.membership.state import Rules


@dataclass
class Store:
    """The records of one job, with a revision for each change."""

    revision: int = 0
    world: World | None = None
    world_revision: int = 0
    members: dict[str, Member] = field(default_factory=dict)
    member_revisions: dict[str, int] = field(default_factory=dict)
    result: dict | None = None
    stop: bool = False

    def snapshot(self) -> Snapshot:
        return Snapshot(
            revision=self.revision,
            world=self.world,
            world_revision=self.world_revision,
            members=dict(sorted(self.members.items())),
            member_revisions=self.member_revisions,
            result=self.result,
            stop=self.stop,
        )

    def put_member(self, member: Member) -> None:
        self.revision += 1
        self.members[member.node] = member
        self.member_revisions[member.node] = self.revision

    def drop_member(self, node: str) -> None:
        self.revision += 1
        self.members.pop(node, None)
        self.member_revisions.pop(node, None)

    def put_world(self, world: World) -> None:
        self.revision += 1
        self.world, self.world_revision = world, self.revision


@dataclass
class Agent:
    """One machine and what its agent would know."""

    name: str
    decision: c.Decision
    pids: dict[str, int] = field(default_factory=dict)
    gone: bool = False

    @property
    def state(self):
        return self.decision.state


class Cluster:
    """Agents by name; `run(script)` returns what every machine did, line by line."""

    def __init__(self, **config) -> None:
        self.now_s = 0.0
        self.store = Store()
        self.agents: dict[str, Agent] = {}
        self.rules = Rules()
        self.queue: deque = deque()
        self.waiting: deque = deque()
        self.held = False
        self.cut_off: set[str] = set()
        self.lines: list[str] = []
        self.pid = 100
        self.starts = 0
        self.alias: dict[str, str] = {}
        self.attempts: dict[str, int] = {}
        self.told: dict[str, tuple[str, str]] = {}
        if config:
            self.config(**config)

    # -- script -----------------------------------------------------------------------------------

    def run(self, script: str) -> list[str]:
        """Run each line; return the script with what followed under each line."""
        for raw in script.splitlines():
            line = raw.partition("#")[0].strip()
            if line.startswith("->") or (not line and not raw.strip()):
                if not raw.strip():
                    self.lines.append("")
                continue
            self.lines.append(raw.rstrip())
            if line:
                self.do(line)
        return self.lines

    def do(self, line: str) -> None:
        """Run one command of the script."""
        word, *words = line.split()
        options = dict(each.split("=", 1) for each in words if "=" in each)
        plain = [each for each in words if "=" not in each]
        getattr(self, word.replace("-", "_"))(*plain, **options)
        self.drain()

    def config(self, **settings: str) -> None:
        """Take settings as text."""
        low, _, high = settings.pop("nodes", "1:1").partition(":")
        workers = settings.pop("max_workers", None)
        world = WorldRules(
            min_nodes=int(low),
            max_nodes=int(high),
            max_workers=None if workers is None else int(workers),
            min_wait_s=float(settings.pop("min_wait_s", 1.0)),
            first_generation=int(settings.pop("first_generation", 1)),
        )
        numbers = {
            key: (value == "yes" if value in ("yes", "no") else float(value))
            for key, value in settings.items()
        }
        for key in ("slots", "spares", "max_failures", "max_reshapes"):
            if key in numbers:
                numbers[key] = int(numbers[key])
        self.rules = Rules(world=world, **numbers)

    def start(self, name: str) -> None:
        self.starts += 1
        decision = machine.begin(
            node=name,
            incarnation=f"{name}-{self.starts}",
            address=f"{name}:1",
            rules=self.rules,
            now_s=self.now_s,
        )
        self.agents[name] = Agent(name=name, decision=decision)
        self.told.pop(name, None)
        self.carry_out(name, decision)

    def ready(self, *workers: str) -> None:
        for worker in workers:
            name, worker_id = self.find(worker)
            self.feed(name, c.WorkerReady(worker_id=worker_id))

    def formed(self, generation: str | None = None) -> None:
        for name, worker_id in self.world_workers():
            number = self.agents[name].state.world.generation
            event = c.WorkerFormed(
                worker_id=worker_id, generation=int(generation or number), step=0
            )
            self.feed(name, event)

    def progress(
        self,
        *workers: str,
        step: str,
        generation: str | None = None,
        phase: str = "compute",
    ) -> None:
        chosen = [self.find(worker) for worker in workers] or self.world_workers()
        for name in self.agents:
            readings = tuple(
                c.Reading(
                    worker_id=worker_id,
                    step=int(step) + 1,
                    committed=int(step),
                    generation=int(generation or self.agents[name].state.world.generation),
                    phase=phase,
                    done=int(step),
                    at_s=self.now_s,
                )
                for where, worker_id in chosen
                if where == name
            )
            if readings:
                self.feed(name, c.ProgressSeen(readings=readings))

    def watch(self, seconds: str, *, step: str, **places: str) -> None:
        standing = {
            self.find(worker): (phase.removesuffix("!"), self.now_s if "!" in phase else None)
            for worker, phase in places.items()
        }
        until_s = self.now_s + float(seconds)
        while self.now_s < until_s - 1e-9:
            self.advance("0.25")
            for name, agent in self.agents.items():
                mine = [(w, place) for (node, w), place in standing.items() if node == name]
                readings = tuple(
                    c.Reading(
                        worker_id=worker_id,
                        step=int(step) + 1,
                        committed=int(step),
                        generation=agent.state.world.generation,
                        phase=phase,
                        done=int(step),
                        at_s=self.now_s if silent_at_s is None else silent_at_s,
                    )
                    for worker_id, (phase, silent_at_s) in mine
                    if agent.state.local(worker_id) is not None
                )
                mark = len(self.lines)
                if readings and not agent.gone:
                    self.feed(name, c.ProgressSeen(readings=readings))
                    self.drain()
                if len(self.lines) > mark:
                    self.lines.insert(mark, f"  -> at {self.now_s:g} s")

    def pause(self, seconds: str) -> None:
        self.now_s = round(self.now_s + float(seconds), 6)

    def die(self, *workers: str, signal: str | None = None, code: str = "1") -> None:
        for worker in workers:
            name, worker_id = self.find(worker)
            self.feed(name, c.WorkerDying(worker_id=worker_id, evidence="is exiting"))
        for worker in workers:
            name, worker_id = self.find(worker)
            self.reap(name, worker_id, None if signal else int(code), int(signal or 0) or None)

    def freeze(self, worker: str) -> None:
        name, worker_id = self.find(worker)
        self.feed(name, c.WorkerStopped(worker_id=worker_id))

    def thaw(self, worker: str) -> None:
        name, worker_id = self.find(worker)
        self.feed(name, c.WorkerContinued(worker_id=worker_id))

    def fail(self, worker: str, error: str, *message: str, step: str, kind: str = "user") -> None:
        name, worker_id = self.find(worker)
        event = c.WorkerFailed(
            worker_id=worker_id,
            error=error,
            message=" ".join(message),
            traceback=f"Traceback of {worker}",
            step=int(step),
            kind=c.FailureKind(kind),
        )
        self.feed(name, event)
        self.reap(name, worker_id, 1, None)

    def broken(self, worker: str) -> None:
        name, worker_id = self.find(worker)
        generation = self.agents[name].state.world.generation
        event = c.GroupBroke(worker_id=worker_id, generation=generation, error="reset by peer")
        self.feed(name, event)

    def finish(self, *workers: str, step: str = "10") -> None:
        pairs = self.world_workers() if workers == ("all",) else [self.find(w) for w in workers]
        for name, worker_id in pairs:
            world = self.agents[name].state.world
            main = world.workers[0].worker_id == worker_id
            self.feed(
                name,
                c.WorkerFinished(
                    worker_id=worker_id,
                    value="result" if main else None,
                    step=int(step),
                    generation=world.generation,
                ),
            )

    def signal(self, name: str, word: str, now: str = "") -> None:
        number = signal.Signals[f"SIG{word}"]
        self.feed(
            name,
            c.StopAsked(
                scope=c.Scope.NODE,
                cause=f"stopped by SIG{word}",
                signal=int(number),
                at_once=bool(now),
            ),
        )

    def job(self, name: str) -> None:
        self.feed(name, c.StopAsked(scope=c.Scope.JOB, cause="stopped by an operator", signal=15))

    def crash(self, name: str) -> None:
        self.agents[name].gone = True
        self.lapse(name)

    def lapse(self, name: str) -> None:
        self.store.drop_member(name)
        agent = self.agents[name]
        if not agent.gone:
            self.feed(name, c.SessionLost(reason="its lease ran out"))
        self.publish()

    def hold(self) -> None:
        self.held = True

    def release(self) -> None:
        self.held = False
        self.let_through()

    def cut(self, name: str) -> None:
        self.cut_off.add(name)

    def mend(self, name: str) -> None:
        self.cut_off.discard(name)
        self.let_through()

    def let_through(self) -> None:
        waiting, self.waiting = self.waiting, deque()
        for name, action in waiting:
            self.answer(name, action)

    def forget(self) -> None:
        for agent in self.agents.values():
            agent.gone = True
        for node in list(self.store.members):
            self.store.drop_member(node)

    def advance(self, seconds: str) -> None:
        until_s = round(self.now_s + float(seconds), 6)
        while True:
            self.drain()
            due = [
                (agent.decision.wake_at_s, name)
                for name, agent in self.agents.items()
                if not agent.gone and agent.decision.wake_at_s is not None
            ]
            due = [item for item in due if item[0] <= until_s]
            if not due:
                break
            at_s, name = min(due)
            self.now_s = max(self.now_s, at_s)
            self.lines.append(f"  -> at {self.now_s:g} s")
            mark = len(self.lines)
            self.feed(name, c.Woke())
            self.drain()
            if len(self.lines) == mark:
                self.lines.pop()
            woken = self.agents[name].decision.wake_at_s
            if woken is not None and woken <= self.now_s and len(self.lines) == mark - 1:
                raise AssertionError(f"{name} asks again and again to be woken at {woken}")
        self.now_s = until_s

    # -- what the agents' surroundings do ---------------------------------------------------

    def drain(self) -> None:
        """Deliver everything that was caused, in order."""
        for _ in range(10_000):
            if not self.queue:
                return
            self.queue.popleft()()
        raise AssertionError("the machines do not come to rest")

    def feed(self, name: str, event: c.Event) -> None:
        """Give one event to one machine and carry out what follows."""
        agent = self.agents[name]
        if agent.gone:
            return
        agent.decision = machine.step(agent.state, event, self.now_s)
        self.carry_out(name, agent.decision)

    def later(self, name: str, event: c.Event) -> None:
        self.queue.append(lambda: self.feed(name, event))

    def publish(self) -> None:
        """Show every agent the store as it is now."""
        snapshot = self.store.snapshot()
        for name in self.agents:
            self.answer(name, lambda name=name: self.feed(name, c.SnapshotSeen(snapshot=snapshot)))

    def answer(self, name: str, action) -> None:
        """Have the store do something for an agent, at once or when it answers again."""
        if self.held or name in self.cut_off:
            self.waiting.append((name, action))
        else:
            self.queue.append(action)

    def reap(self, name: str, worker_id: str, code: int | None, number: int | None) -> None:
        self.agents[name].pids.pop(worker_id, None)
        self.later(name, c.WorkerReaped(worker_id=worker_id, exit_code=code, signal=number))

    def carry_out(self, name: str, decision: c.Decision) -> None:
        """Note the commands and cause their answers."""
        for command in decision.commands:
            text = self.describe(command)
            if text:
                self.lines.append(f"  -> {name}: {text}")
            self.act(name, command)
        now = (str(decision.state.phase), decision.reason)
        if self.told.get(name) != now:
            self.told[name] = now
            self.lines.append(f"  -> {name} is {now[0]}: {self.named(now[1])}")

    def act(self, name: str, command: c.Command) -> None:  # noqa: C901 - one line per command
        store = self.store
        agent = self.agents[name]
        match command:
            case c.StartForkServer():
                self.later(name, c.ForkServerUp())
            case c.OpenSession(member=member):
                self.answer(name, lambda: (store.put_member(member), self.opened(name)))
            case c.EnterAttempt(clear=clear):
                self.answer(name, lambda: self.entered(name, clear))
            case c.WriteMember(member=member):
                self.answer(name, lambda: self.wrote(name, member, None))
            case c.WriteWorld():
                self.answer(name, lambda: self.wrote(name, command.member, command))
            case c.WriteResult(result=result, world_revision=revision):
                self.answer(name, lambda: self.wrote_result(name, result, revision))
            case c.WriteStop():
                self.answer(name, lambda: self.wrote_stop(name))
            case c.StartWorker(worker_id=worker_id, slot=slot):
                self.pid += 1
                agent.pids[worker_id] = self.pid
                place = f"{name}.{slot}"
                number = self.attempts.get(place, 0) + 1
                self.attempts[place] = number
                self.alias[worker_id] = place if number == 1 else f"{place}#{number}"
                self.later(name, c.WorkerStarted(worker_id=worker_id, pid=self.pid))
            case c.KillWorker(worker_id=worker_id):
                self.reap(name, worker_id, None, 9)
            case c.Tell(word=c.Word.FINISH, worker_ids=worker_ids):
                for worker_id in worker_ids:
                    self.reap(name, worker_id, 0, None)
            case c.SettleSaves():
                self.later(name, c.SavesSettled())
            case c.Leave():
                agent.gone = True
                self.answer(name, lambda: (store.drop_member(name), self.publish()))
            case _:
                pass

    def opened(self, name: str) -> None:
        self.feed(name, c.SessionOpened())
        self.publish()

    def entered(self, name: str, clear: bool) -> None:
        if clear:
            self.store.result, self.store.stop = None, False
            self.publish()
        self.feed(name, c.AttemptEntered())

    def wrote(self, name: str, member: Member, write: c.WriteWorld | None) -> None:
        store = self.store
        if member.node not in store.members:
            self.feed(name, c.WriteFailed(reason="the own record is gone"))
            return
        accepted = write is None or store.world_revision == write.after_revision
        if accepted:
            store.put_member(member)
            if write is not None:
                store.put_world(write.world)
        self.feed(name, c.WriteDone(accepted=accepted))
        self.publish()

    def wrote_result(self, name: str, result: dict, revision: int) -> None:
        store = self.store
        accepted = store.result is None and store.world_revision == revision
        if accepted:
            store.revision += 1
            store.result = result
        self.feed(name, c.WriteDone(accepted=accepted))
        self.publish()

    def wrote_stop(self, name: str) -> None:
        self.store.revision += 1
        self.store.stop = True
        self.feed(name, c.WriteDone(accepted=True))
        self.publish()

    # -- names ------------------------------------------------------------------------------

    def find(self, worker: str) -> tuple[str, str]:
        """Return (agent, worker id) of a name such as a.0 or a.0#2 (a.0: its newest process)."""
        for worker_id, alias in reversed(self.alias.items()):
            if alias == worker or (alias.partition("#")[0] == worker):
                return worker.partition(".")[0], worker_id
        raise AssertionError(f"no worker is called {worker}")

    def world_workers(self) -> list[tuple[str, str]]:
        """Return (agent, worker id) of the living workers of the World in force."""
        if self.store.world is None:
            return []
        return [
            (worker.node, worker.worker_id)
            for worker in self.store.world.workers
            if worker.node in self.agents
            and not self.agents[worker.node].gone
            and worker.worker_id in self.agents[worker.node].pids
        ]

    def named(self, text: str) -> str:
        """Put names for people in place of worker ids."""
        for worker_id, alias in self.alias.items():
            text = text.replace(worker_id, alias)
        return text

    def describe(self, command: c.Command) -> str:
        """Return one command as one line."""
        match command:
            case c.WriteWorld(world=world, after_revision=after):
                ids = " ".join(worker.worker_id for worker in world.workers)
                text = (
                    f"WriteWorld g{world.generation} {world.mode} [{ids}] "
                    f"stores={','.join(world.stores)} over revision {after}"
                )
            case c.WriteMember(member=member):
                ids = " ".join(worker.worker_id for worker in member.workers)
                marks = " leaving" * member.leaving + " finished" * member.finished
                marks += f" stalled in g{member.stalled}" if member.stalled else ""
                text = f"WriteMember [{ids}]{marks}"
            case c.TellWorld(world=world, worker_ids=ids, first=first):
                text = f"TellWorld g{world.generation}{' (first)' * first} -> {' '.join(ids)}"
            case c.Tell(word=word, worker_ids=ids):
                text = f"Tell {word} -> {' '.join(ids)}"
            case c.StartWorker(worker_id=worker_id, slot=slot, first=first):
                number = self.attempts.get(f"{worker_id.split('.')[0]}.{slot}", 0) + 1
                text = f"StartWorker slot {slot}, try {number}{' (first)' * first}"
            case c.KillWorker(worker_id=worker_id, reason=reason, stack=stack):
                text = f"KillWorker {worker_id}{' (stack)' * stack}: {reason}"
            case c.WriteResult(result=result):
                text = f"WriteResult exit_code={result['exit_code']} {result['cause']}".rstrip()
            case c.SettleSaves(deadline_at_s=deadline_at_s):
                text = f"SettleSaves until {deadline_at_s:g} s"
            case c.EnterAttempt(clear=clear):
                text = f"EnterAttempt{' (clear)' * clear}"
            case c.Leave(outcome=outcome):
                worker = f" worker={outcome.worker}" if outcome.worker else ""
                text = (
                    f"Leave exit_code={outcome.exit_code} value={outcome.value!r} "
                    f"g{outcome.generation} step={outcome.step}{worker} {outcome.cause}"
                ).rstrip()
            case c.Note() | c.OpenSession():
                return ""
            case _:
                text = type(command).__name__
        return self.named(text)
