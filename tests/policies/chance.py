"""A world in which things happen at random, drawn from one seed: thousands of steps in a second.

`python -m tests.policies.chance [STEPS]` prints the digest of what was decided in the worlds of the suite.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from hashlib import sha256
from random import Random

from policies.rules import Rules
from policies.types import BackendView, Ending, Job, RemoteLoad, Usage
from tests.policies.world import WEIGHTS, Plan, World

PLANS = (
    Plan(1),
    Plan(2, deadlines=True),
    Plan(3, tardy=True, deadlines=True),
    Plan(4, shares=False),
    Plan(5, rules=Rules(reserve=False, wait_for_warm=False)),
    Plan(6, routing="prefix_affinity"),
    Plan(7, routing="round_robin", deadlines=True),
    Plan(8, rules=Rules(quantum_requests=1.0, index_tokens=4000, samples=1), deadlines=True),
    Plan(9, routing="least_tokens", tardy=True),
)
FAMILIES = 5


class Chance:
    """Draws what happens next."""

    def __init__(self, plan: Plan) -> None:
        self.world = World(plan)
        self.rng = Random(f"{plan.seed} chance")
        self._events = {
            self.arrive: 30,
            self.begin: 22,
            self.speak: 14,
            self.end: 22,
            self.abandon: 4,
            self.wait: 22,
            self.change: 4,
            self.listen: 3,
            self.hand_over: 4,
            self.flood: 1,
        }

    def run(self, steps: int) -> World:
        """So many events, and then everybody goes home."""
        events, weights = list(self._events), list(self._events.values())
        for _ in range(steps):
            self.rng.choices(events, weights)[0]()
        self.world.drain()
        return self.world

    def job(self) -> Job:
        """Short, middling and long prompts; some share their beginnings; some may not go everywhere."""
        rng, world = self.rng, self.world
        tokens = rng.choice((rng.randint(1, 200), rng.randint(300, 3000), rng.randint(3000, 30_000)))
        family, pieces = rng.randrange(FAMILIES), tokens // 256
        branch = rng.randint(0, pieces)
        own = rng.randrange(3)
        prefix = [b"%d/%d" % (family, i) for i in range(branch)]
        prefix += [b"%d/%d.%d/%d" % (family, branch, own, i) for i in range(branch, pieces)]
        tenant = rng.choice(list(WEIGHTS))
        arrived = world.now - (rng.random() if rng.random() < 0.1 else 0.0)
        names = list(world.views) or ["b0"]
        output = rng.choice((0, 1, 60, 400))
        return Job(
            next(world.ids),
            tenant,
            arrived,
            rng.choice(("interactive", "interactive", "batch")),
            WEIGHTS[tenant],
            tokens,
            output,
            tuple(prefix) if rng.random() < 0.7 else (),
            streamed=output > 0 and rng.random() < 0.7,
            deadline=arrived + rng.uniform(0.2, 12.0) if world.plan.deadlines and rng.random() < 0.5 else None,
            candidates=frozenset(rng.sample(names, rng.randint(1, len(names)))) if rng.random() < 0.08 else None,
            tried=frozenset([rng.choice(names)]) if rng.random() < 0.06 else frozenset(),
        )

    def arrive(self) -> None:
        self.world.submit(self.job())

    def flood(self) -> None:
        for _ in range(20):
            self.world.submit(self.job())

    def begin(self) -> None:
        """The first token of some stream comes."""
        ready = [i for i, run in self.world.runs.items() if run.job.streamed and not run.streaming]
        if ready:
            self.world.first_token(self.rng.choice(ready))

    def speak(self) -> None:
        """Some stream goes on; now and then one that is not there, or whose first token was not told."""
        streams = [i for i, run in self.world.runs.items() if run.streaming]
        if streams:
            self.world.tokens(self.rng.choice(streams), self.rng.choice((1, 5, 40)))
        elif self.rng.random() < 0.2:
            self.world.tokens(self.rng.choice([*self.world.runs, 0]), 1)

    def end(self) -> None:
        if self.world.runs:
            self._end(self.rng.choice(list(self.world.runs)))

    def _end(self, job_id: int) -> None:
        rng, run = self.rng, self.world.runs[job_id]
        ending = rng.choices(list(Ending), (8, 1, 2))[0]
        usage = None
        if ending is Ending.SUCCESS and rng.random() < 0.8:
            cached = rng.choice((None, 0, run.job.prompt_tokens // 2))
            usage = Usage(run.job.prompt_tokens, rng.randint(0, 500), cached)
        self.world.leave(job_id, ending, usage, quietly=rng.random() < 0.2)

    def abandon(self) -> None:
        """Somebody leaves the queue, or somebody who had left leaves again."""
        known = [*self.world.waiting, *list(self.world.finished)[-1:], 10**9]
        self.world.leave(self.rng.choice(known), Ending.IGNORED, quietly=self.rng.random() < 0.2)

    def hand_over(self) -> None:
        """A job gets its place, and is gone before it can take it."""
        before = set(self.world.runs)
        self.world.submit(self.job())
        for job_id in self.world.runs.keys() - before:
            self.world.leave(job_id, Ending.IGNORED)

    def wait(self) -> None:
        self.world.pass_time(self.rng.choice((0.001, 0.05, 0.3, 2.0)) * self.rng.random())

    def change(self) -> None:
        """Backends come, go, restart, are drained and come back, or turn out to be of another size."""
        rng, world = self.rng, self.world
        for _ in range(rng.choice((1, 1, 2))):
            views = list(world.views.values())
            index = rng.randrange(len(views)) if views else 0
            match rng.randrange(6):
                case 0 | 1 if len(views) < 4:
                    name = next(f"b{i}" for i in range(5) if f"b{i}" not in world.views)
                    views.append(self._view(name))
                case 2 if views:
                    del views[index]
                case 3 if views:
                    views[index] = replace(views[index], incarnation=views[index].incarnation + 1)
                case 4 if views:
                    views[index] = replace(views[index], open=not views[index].open)
                case _ if views:
                    view = self._view(views[index].name)
                    views[index] = replace(view, incarnation=views[index].incarnation)
            world.observe(views)

    def _view(self, name: str) -> BackendView:
        rng = self.rng
        kv = rng.choice((None, 15_000, 200_000))
        used = rng.choice((None, None, kv // 3)) if kv else None
        return BackendView(name, 0, rng.choice((1, 3, 256)), kv, used, rng.choice((1.0, 0.5)))

    def listen(self) -> None:
        """Another gateway tells what it has."""
        rng = self.rng
        loads = [
            RemoteLoad(
                name,
                tokens := rng.choice((0, 0, 500, 8000)),
                tokens / 5000,
                rng.choice((float("inf"), 0.5, -0.2)),
                rng.choice((0, 1, 2)),
                rng.choice((0, 5000)),
                rng.choice((None, 8.0)) if self.world.gated else None,
            )
            for name in [*self.world.views, "elsewhere"]
            if rng.random() < 0.6
        ]
        self.world.hear(rng.choice(("g1", "g2")), loads)


def digest(steps: int) -> str:
    """Of all that was decided in all worlds."""
    whole = sha256()
    for plan in PLANS:
        whole.update("\n".join(Chance(replace(plan, alone=True)).run(steps).log).encode())
    return whole.hexdigest()


if __name__ == "__main__":
    sys.stdout.write(digest(int(sys.argv[1]) if len(sys.argv) > 1 else 300) + "\n")
