"""Simulate a pool of replicas behind a policy, on a public trace.

    python -m loadtests.simulate --trace conversation --load 2.4 --policy headrace --seeds 5 --json

`--policy headrace` runs the very scheduler of the gateway; the published policies are in loadtests/baselines.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from random import Random
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from loadtests import baselines
from loadtests.fleet import Fleet
from loadtests.gateways import ABLATIONS, scheduler
from loadtests.profiles import PROFILES, S
from loadtests.results import Figures, figures, mean_ci
from loadtests.router import Router
from loadtests.scenario import SHARES, Scenario
from loadtests.simulation import Simulation
from loadtests.traces import names
from loadtests.workload import Call, ClosedLoop, OpenLoop

# Sessions are simulated and watched for this long: the ramp and the end are left out (seconds).
CLOSED_LOOP_S, WATCHED_S = 3000.0, (600.0, 2850.0)


def simulate(scenario: Scenario, seed: int) -> list[Call]:
    """One run: all calls that count, with what became of them. Equal arguments give equal results."""
    fleet = Fleet(scenario)
    closed = scenario.trace == "agentic"
    workload = ClosedLoop(scenario, seed, CLOSED_LOOP_S) if closed else OpenLoop(scenario, seed)
    routers: list[Router]
    if scenario.policy == "headrace":
        routers = [
            scheduler(scenario, fleet, seed, number, workload.piece_tokens) for number in range(scenario.gateways)
        ]
    else:
        routers = [baselines.baseline(scenario.policy, fleet, Random(f"{seed} policy"))]
    calls = Simulation(scenario, workload, fleet, routers, exact=scenario.policy != "headrace").run(
        int(CLOSED_LOOP_S * S) if closed else None
    )
    if closed:
        first, last = (int(at_s * S) for at_s in WATCHED_S)
        calls = [call for call in calls if first <= call.arrived_ps < last]
    return calls


def run(scenario: Scenario, seed: int) -> Figures:
    """The figures of one run."""
    return figures(simulate(scenario, seed), scenario)


def run_all(cells: Sequence[tuple[Scenario, int]], jobs: int) -> Iterator[tuple[Scenario, int, Figures]]:
    """The figures of many runs, in their order, over so many processes."""
    if jobs <= 1:
        for scenario, seed in cells:
            yield scenario, seed, run(scenario, seed)
        return
    with ProcessPoolExecutor(jobs) as pool:
        for (scenario, seed), found in zip(cells, pool.map(run, *zip(*cells, strict=True)), strict=True):
            yield scenario, seed, found


def seconds(text: str | float) -> float:
    """`10ms`, `0.5s` or `2` as seconds."""
    value = str(text)
    scale = 1e-3 if value.endswith("ms") else 1.0
    try:
        return float(value.removesuffix("s").removesuffix("m")) * scale
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a duration such as 10ms or 0.5s") from None


SHARE = click.FloatRange(0.0, 1.0)
POSITIVE = click.FloatRange(0.0, min_open=True)
POLICIES = ["headrace", *baselines.names()]


@click.command(context_settings={"show_default": True})
@click.option("--trace", type=click.Choice([*names(), "agentic"]), default="conversation")
@click.option("--load", type=POSITIVE, default=1.0, help="Times the trace's own pace.")
@click.option("--policy", type=click.Choice(POLICIES), default="headrace", metavar="NAME", help=", ".join(POLICIES))
@click.option("--ablate", type=click.Choice(list(ABLATIONS)), help="A rule of the scheduler to switch off.")
@click.option("--seeds", type=click.IntRange(1), default=5, help="How many runs.")
@click.option("--first-seed", type=int, default=1)
@click.option("--jobs", type=click.IntRange(1), default=1, help="Processes.")
@click.option("--json", "as_json", is_flag=True, help="One JSON object instead of a table.")
@click.option("--signal-delay", "signal_delay_s", type=seconds, default=0.0, help="From the engine to the gateway.")
@click.option("--estimate-error", type=click.FloatRange(0.0), default=0.0, help="Sigma of the log of token estimates.")
@click.option("--estimate-bias", type=POSITIVE, default=1.0, help="Factor of all token estimates.")
@click.option("--index", type=click.Choice(["exact", "approximate"]), default="exact")
@click.option("--non-streamed", type=SHARE, default=0.0, help="Share of requests.")
@click.option(
    "--tenants",
    type=click.IntRange(-1, len(SHARES)),
    default=0,
    help="Of 50, 20, 15, 10, 5 %; -1: the trace's.",
)
@click.option("--aggressor", type=POSITIVE, default=1.0, help="Times its share that the fourth tenant sends.")
@click.option("--salted", is_flag=True, help="Tenants share no cache.")
@click.option("--batch", type=SHARE, default=0.0, help="Share of requests in the batch class.")
@click.option("--sessions", type=click.IntRange(1), default=32, help="Users at work at once (agentic).")
@click.option("--burst", type=click.FloatRange(1.0), default=1.0, help="Times the load, for 60 s in the middle.")
@click.option("--limit", type=click.IntRange(0), default=0, help="Only so many requests of the trace; 0: all.")
@click.option("--replicas", type=click.IntRange(1), default=8)
@click.option("--profile", type=click.Choice(list(PROFILES)), default="qwen3-32b-h100")
@click.option("--kv-tokens", type=click.IntRange(1024), default=250_000, help="Of each replica.")
@click.option("--chunk", type=click.IntRange(257), default=2048, help="Tokens per engine step.")
@click.option("--gateways", type=click.IntRange(1), default=1)
@click.option("--gateway-delay", "gateway_delay_s", type=seconds, default=0.005, help="Between gateways.")
@click.option("--slo-tpot", "slo_tpot_s", type=seconds, default=0.1)
def main(seeds: int, first_seed: int, jobs: int, as_json: bool, ablate: str | None, **options: Any) -> None:
    """Simulate a pool behind a policy on a public trace."""
    scenario = Scenario(ablate=ablate or "", **options)
    cells = [(scenario, first_seed + i) for i in range(seeds)]
    found: list[Figures] = []
    with Progress(console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task(f"{scenario.trace} x{scenario.load:g} {scenario.policy}", total=seeds)
        try:
            for _, _, one in run_all(cells, jobs):
                found.append(one)
                progress.advance(task)
        except ValueError as error:
            raise click.ClickException(str(error)) from error
    spread = {name: mean_ci([one[name] for one in found]) for name in found[0]}
    if as_json:
        means: dict[str, object] = {name: mean for name, (mean, _) in spread.items()}
        means["ci95"] = {name: half for name, (_, half) in spread.items()}
        means["seeds"] = [seed for _, seed in cells]
        means["scenario"] = asdict(scenario)
        print(json.dumps(means))
        return
    table = Table("figure", "mean", "95 % CI", title=f"{scenario.policy}, {scenario.trace} x{scenario.load:g}")
    for name, (mean, half) in spread.items():
        table.add_row(name, f"{mean:.4g}", f"\u00b1 {half:.2g}" if seeds > 1 else "")
    Console().print(table)


if __name__ == "__main__":
    main()
