"""The doctor, on made-up series: each fault is named first, with its evidence; what is not known is said."""

from __future__ import annotations

import json

import pytest

from gateway.diagnosis import Diagnosis, diagnosis
from gateway.experiments import ADVICE
from gateway.facts import facts
from gateway.hypotheses import WITNESSES, ramp
from gateway.samples import Samples, Window, answered, read

KEY = 'model="m",class="interactive"'
Series = dict[str, float]
SECONDS, REQUESTS = 60.0, 600.0


def histogram(name: str, labels: str, counts: dict[float, float], total: float) -> Series:
    """`counts`: how many are up to each bound, and above those before it; `total` is their sum."""
    series, below, comma = dict[str, float](), 0.0, "," if labels else ""
    for bound, number in counts.items():
        below += number
        series[f'{name}_bucket{{{labels}{comma}le="{bound}"}}'] = below
    series[f'{name}_bucket{{{labels}{comma}le="+Inf"}}'] = series[f"{name}_count{{{labels}}}"] = below
    return series | {f"{name}_sum{{{labels}}}": total}


def objective(name: str, missed: float) -> Series:
    told = f'headrace_objectives_total{{{KEY},objective="{name}"'
    return {f'{told},result="met"}}': REQUESTS - missed, f'{told},result="missed"}}': missed}


def misses(**causes: float) -> Series:
    """600 requests were judged, and so many were not good."""
    good = {f'headrace_goodput_total{{{KEY},tenant="t"}}': REQUESTS - sum(causes.values())}
    return good | {
        f'headrace_slo_misses_total{{{KEY},tenant="t",cause="{cause}"}}': number for cause, number in causes.items()
    }


def parts(**seconds: float) -> Series:
    """What the time to the first token of 600 requests consists of, on average."""
    told = {"gateway": 0.001, "queue": 0.002, "connect": 0.001, "backend": 0.2} | seconds
    series = dict[str, float]()
    for part, mean in told.items():
        series |= histogram("headrace_ttft_part_seconds", f'{KEY},part="{part}"', {1.0: REQUESTS}, REQUESTS * mean)
    return series


HEALTHY: Series = {
    'headrace_build_info{version="1"}': 1,
    f'headrace_requests_total{{{KEY},tenant="t",outcome="ok"}}': REQUESTS,
    f"headrace_request_seconds_count{{{KEY}}}": REQUESTS,
    'headrace_tokens_total{model="m",tenant="t",direction="input"}': REQUESTS * 500,
    'headrace_tokens_total{model="m",tenant="t",direction="output"}': REQUESTS * 100,
    'headrace_objective_seconds{model="m",objective="ttft"}': 1.0,
    'headrace_objective_seconds{model="m",objective="itl"}': 0.05,
    'headrace_prefix_predicted_tokens_total{pool="p"}': 60_000,
    'headrace_prefix_confirmed_tokens_total{pool="p"}': 57_000,
    'headrace_prefix_prompt_tokens_total{pool="p"}': 300_000,
    'headrace_affinity_total{pool="p",result="hit"}': REQUESTS,
    'headrace_backend_state{pool="p",backend="a",state="up"}': 1,
    'headrace_backend_state{pool="p",backend="b",state="up"}': 1,
    'headrace_in_flight_requests{pool="p",backend="a"}': 8,
    'headrace_in_flight_requests{pool="p",backend="b"}': 8,
    'headrace_engine_running_requests{pool="p",backend="a"}': 8,
    'headrace_engine_kv_ratio{pool="p",backend="a"}': 0.4,
    'headrace_queued_requests{pool="p",class="interactive"}': 0,
    "process_cpu_seconds_total": 12,
    **objective("ttft", 1),
    **objective("itl", 1),
    **objective("availability", 0),
    **misses(prefill=1, decode=1),
    **parts(),
    **histogram("headrace_loop_lag_seconds", "", {0.001: 590, 0.01: 10}, 1.0),
    **histogram("headrace_ttft_seconds", KEY, {0.1: 300, 0.3: 290, 1.0: 10}, 100.0),
    **histogram("headrace_inter_token_seconds", KEY, {0.02: 50_000, 0.05: 10_000}, 900.0),
}
BEGUN = {'headrace_build_info{version="1"}': 1.0}
LATE = histogram("headrace_ttft_seconds", KEY, {0.3: 200, 1.0: 200, 5.0: 200}, 900.0)
STALLS = histogram("headrace_loop_lag_seconds", "", {0.001: 480, 0.01: 20, 0.5: 100}, 30.0)
REFUSED = {f'headrace_refusals_total{{{KEY},reason="queue_full",fault="capacity"}}': 60.0}

# the fault, what it does to the series, and the hypothesis that must lead
FAULTS: dict[str, tuple[Series, str]] = {
    "slow prefill": (objective("ttft", 200) | misses(prefill=200) | parts(backend=1.5) | LATE, "prefill"),
    "slow decode": (
        objective("itl", 250)
        | misses(decode=250)
        | histogram("headrace_inter_token_seconds", KEY, {0.05: 30_000, 0.1: 30_000}, 4000.0),
        "decode",
    ),
    "queue saturation": (
        objective("ttft", 150)
        | misses(queue=150, refused=60)
        | parts(queue=3.0, backend=0.4)
        | LATE
        | REFUSED
        | {'headrace_queued_requests{pool="p",class="interactive"}': 40},
        "queue",
    ),
    "a cold backend": (
        objective("ttft", 120)
        | misses(prefill=120)
        | parts(backend=1.2)
        | LATE
        | {'headrace_prefix_confirmed_tokens_total{pool="p"}': 9_000},
        "cold",
    ),
    "a stall of the gateway's processor": (
        objective("ttft", 10)
        | objective("itl", 400)
        | misses(gateway=20, prefill=10, decode=400)
        | parts(gateway=0.1, backend=0.3)
        | STALLS
        | {"process_cpu_seconds_total": 30},  # something else has the core
        "gateway",
    ),
    "too much at once": (
        objective("ttft", 250)
        | objective("itl", 250)
        | misses(prefill=120, decode=130)
        | LATE
        | {'headrace_engine_kv_ratio{pool="p",backend="a"}': 0.99}
        | {'headrace_engine_waiting_requests{pool="p",backend="a"}': 6},
        "saturation",
    ),
    "backends that fail": (
        objective("availability", 60)
        | misses(upstream=60)
        | {'headrace_upstream_failures_total{pool="p",backend="a",reason="upstream_error"}': 120}
        | {'headrace_backend_state{pool="p",backend="b",state="up"}': 0}
        | {'headrace_backend_state{pool="p",backend="b",state="down"}': 1},
        "failing",
    ),
    "slow connections": (
        objective("ttft", 60) | misses(connect=60) | parts(connect=0.5, backend=0.3) | LATE,
        "network",
    ),
}


def samples(series: Series) -> Samples:
    return read("\n".join(f"{name} {value}" for name, value in series.items()))


def told(*changes: Series, first: Series | None = None) -> Diagnosis:
    """Of a window that began with nothing counted, unless `first` says otherwise."""
    series = HEALTHY
    for change in changes:
        series = series | change
    return diagnosis(facts(Window(samples(first or BEGUN), samples(series), SECONDS)))


@pytest.mark.parametrize("fault", list(FAULTS))
def test_the_fault_is_named_first(fault: str) -> None:
    """By a clear distance, with evidence that holds numbers, and an experiment for it that leads."""
    change, name = FAULTS[fault]
    found = told(change)
    leading, *others = found.hypotheses
    assert leading.name == name, [(each.name, each.score) for each in found.hypotheses]
    assert leading.word != "weak" and all(each.score < leading.score - 0.1 for each in others)
    assert any(each.strength > 0 and any(map(str.isdigit, each.text)) for each in leading.evidence)
    assert found.experiments[0][0] == name


def test_of_health_nothing_is_told() -> None:
    """A few late requests are no hypothesis."""
    assert told().hypotheses == () and told().experiments == ()
    assert "looks healthy" in told().conclusion


def test_health_is_only_told_of_what_could_be_ill() -> None:
    """Not where nothing was asked, of a handful, without objectives, or while they are missed for an unknown reason."""
    few = {name: value / 60 if "_total" in name else value for name, value in HEALTHY.items()}
    free = {name: value for name, value in HEALTHY.items() if "objective" not in name}

    def concluded(series: Series) -> str:
        return diagnosis(facts(Window(samples(BEGUN), samples(series), SECONDS))).conclusion

    assert "no request ended" in concluded(BEGUN)
    assert "too few" in concluded(few) and "without objectives" in concluded(free)
    assert "says why" in concluded(HEALTHY | objective("itl", 35))
    assert "Backends take long for prompts [strong]" in told(FAULTS["slow prefill"][0]).conclusion


def test_what_several_gateways_say_of_one_backend_counts_once() -> None:
    """Two that see the same two backends have two, and one of them out is one."""
    twice = {f'headrace_backend_state{{pool="p",backend="{name}",state="up",instance="2"}}': 1.0 for name in "ab"}
    found = told(twice).facts
    assert found.backends == 2 and found.states == {"up": 2}
    found = told(twice | FAULTS["backends that fail"][0]).facts
    assert found.backends == 2 and found.states["down"] == 1


def test_late_tokens_alone_do_not_blame_caches() -> None:
    """Where all that was expected is found, and no backend is new."""
    found = told(FAULTS["queue saturation"][0]).hypotheses
    assert "cold" not in {each.name for each in found}


def test_without_load_nothing_is_told_with_confidence() -> None:
    """The same shares of a handful of requests are weak, and it is said why."""
    few = {name: value / 200 if "_total" in name or "seconds" in name else value for name, value in HEALTHY.items()}
    fault = {name: value / 200 for name, value in FAULTS["slow prefill"][0].items()}
    found = diagnosis(facts(Window({}, samples(few | fault), SECONDS)))
    assert all(each.word == "weak" for each in found.hypotheses)
    assert found.missing[0].startswith("Requests: 3 in 60 s")


def test_what_is_missing_is_said() -> None:
    """Each thing by the lack of its series; accelerators always."""
    assert len(told().missing) == 1 and "Accelerators" in told().missing[0]
    build = {'headrace_build_info{version="1"}': 1.0}
    idle = diagnosis(facts(Window({}, samples(build), SECONDS)))
    always = ["Requests", "History", "Objectives", "Engines", "The gateway", "Accelerators"]
    assert [text.split(":")[0] for text in idle.missing] == always  # what engines do not report shows once they answer
    asked = {f'headrace_requests_total{{{KEY},tenant="t",outcome="ok"}}': REQUESTS}
    bare = diagnosis(facts(Window({}, samples(build | asked), SECONDS)))
    lacking = {text.split(":")[0] for text in bare.missing}
    assert lacking >= {"Objectives", "First tokens", "Lengths", "Caches", "Engines", "The gateway", "Accelerators"}
    assert idle.hypotheses == ()


def test_every_hypothesis_can_be_tested() -> None:
    """How to confirm and refute it, and experiments with what they cost and when they are accepted."""
    assert ADVICE.keys() == WITNESSES.keys()
    for advice in ADVICE.values():
        assert advice.title and advice.confirm and advice.refute and advice.experiments
        assert all(each.change and each.trade_off and each.accept for each in advice.experiments)


def test_its_document_is_json_and_whole() -> None:
    """For programs: the order of the report, and the evidence with its strength."""
    document = json.loads(json.dumps(told(FAULTS["slow decode"][0]).document()))
    assert list(document) == ["facts", "missing", "conclusion", "objectives", "hypotheses", "experiments"]
    assert document["facts"]["requests"] == REQUESTS and document["facts"]["prompt_tokens"] == 500
    itl = next(each for each in document["objectives"] if each["name"] == "itl")
    assert (itl["model"], itl["bound_s"], itl["met"], itl["missed"]) == ("m", 0.05, 350, 250)
    assert document["hypotheses"][0]["name"] == "decode" and document["hypotheses"][0]["confirm"]


def test_only_what_happened_in_the_window_counts() -> None:
    """A fault of yesterday is in both readings, and in no finding; a process that began anew counts from zero."""
    faulty = HEALTHY | FAULTS["slow prefill"][0]
    later = {name: value * 2 if "_total" in name or "seconds_" in name else value for name, value in HEALTHY.items()}
    grown = {name: faulty.get(name, 0.0) + value / 2 if name in faulty else value for name, value in later.items()}
    assert diagnosis(facts(Window(samples(faulty), samples(grown), SECONDS))).hypotheses == ()
    anew = Window(samples({"headrace_x_total": 100}), samples({"headrace_x_total": 7}), SECONDS)
    assert anew.increase("headrace_x_total") == 7


def test_gateways_are_taken_together() -> None:
    """Series of several instances add up; processor time is that of one process."""
    series = samples(HEALTHY)
    both = answered(
        {"metric": dict(labels) | {"__name__": name, "instance": instance}, "value": [0, str(value)]}
        for name, told in series.items()
        for labels, value in told.items()
        for instance in ("one", "two")
    )
    found = facts(Window({}, both, SECONDS))
    assert found.requests == 2 * REQUESTS and found.cores == pytest.approx(12 / SECONDS)
    assert found.ttft_s == facts(Window({}, series, SECONDS)).ttft_s


def test_workers_that_share_an_admin_port_have_a_core_each() -> None:
    """Four, each of which uses a quarter of one, are not at the end of theirs."""
    busy = HEALTHY | {"process_cpu_seconds_total": SECONDS, "headrace_workers": 4}
    found = facts(Window({}, samples(busy), SECONDS))
    assert found.cores == pytest.approx(0.25)
    assert diagnosis(found).hypotheses == ()


def test_labels_are_read_as_they_were_meant() -> None:
    """Escapes, commas and braces in values."""
    found = read('a{x="1,\\"}\\n\\\\",y=""} 2.5\n# TYPE a gauge\na 3\n')
    assert found == {"a": {(("x", '1,"}\n\\'), ("y", "")): 2.5, (): 3.0}}


def test_a_quantile_lies_within_its_bucket_as_prometheus_has_it() -> None:
    """Evenly spread; above the highest bound it is that bound; of nothing it is nothing."""
    window = Window(
        {}, samples(histogram("h", KEY, {1.0: 50, 3.0: 50}, 9.0) | {f'h_bucket{{{KEY},le="+Inf"}}': 100}), 1
    )
    assert [window.quantile("h", share) for share in (0.25, 0.5, 0.75, 1.0)] == [0.5, 1.0, 2.0, 3.0]
    above = Window({}, samples({'h_bucket{le="1.0"}': 1, 'h_bucket{le="+Inf"}': 10}), 1)
    assert above.quantile("h", 0.9) == 1.0 and above.quantile("g", 0.9) is None


def test_a_ramp() -> None:
    """Nothing, half, all; downwards too."""
    assert [ramp(value, 1, 3) for value in (0, 1, 2, 3, 9)] == [0, 0, 0.5, 1, 1]
    assert [ramp(value, 3, 1) for value in (9, 2, 0)] == [0, 0.5, 1]
    assert ramp(None, 0, 1) == 0
