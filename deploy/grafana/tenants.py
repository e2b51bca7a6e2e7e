"""Who uses what, and how well they are served."""

from __future__ import annotations

from grafana_foundation_sdk.builders.dashboard import Dashboard

from deploy.grafana.panels import NUMBER, PER_SECOND, SHARE, Row, board, listing, series
from deploy.grafana.terms import OWNED, WHOSE, rates

TOKENS = '{{model=~"$model",tenant=~"$tenant",direction="{}"}}'
FAILED = '{model=~"$model",tenant=~"$tenant",class=~"$class",outcome!="ok"}'

LIMITED = '{tenant=~"$tenant"}'
AT_LIMIT = '{tenant=~"$tenant",outcome=~".+_limit"}'


def use() -> Row:
    tokens = [rates("headrace_tokens_total", "tenant", TOKENS.format(way)) for way in ("input", "output")]
    cost = rates("headrace_cost_total", "tenant", OWNED)
    return "Use", [
        series("Requests", "Per second.", PER_SECOND, rates("headrace_requests_total", "tenant", WHOSE)),
        series("Tokens in", "Per second.", NUMBER, tokens[0]),
        series("Tokens out", "Per second.", NUMBER, tokens[1]),
        series("Cost", "Of the backend time that requests had, per second.", NUMBER, cost, stacked=True),
    ]


def limits() -> Row:
    """Gateways that share limits all know of the same use, each a little of it late: the most is the best guess."""
    by, each = "max by (tenant, model, kind)", "{{tenant}} {{model}} {{kind}}"
    used, limit = (f"{by} (headrace_tenant_{name}{LIMITED})" for name in ("used", "limit"))
    refused = rates("headrace_requests_total", "tenant, outcome", AT_LIMIT)
    return "Limits", [
        series(
            "Used of the limits", "Refused is what would be more than all of one.", SHARE, (f"{used} / {limit}", each)
        ),
        series("Over a limit", "Requests per second that were refused for it.", PER_SECOND, refused),
        listing("Limits", "What fits at one moment, or may run at once.", limit),
    ]


def service() -> Row:
    missed = rates("headrace_slo_misses_total", "tenant, cause", WHOSE)
    failed = rates("headrace_requests_total", "tenant, outcome", FAILED)
    hour = f"sum by (tenant, model, outcome) (increase(headrace_requests_total{WHOSE}[1h]))"
    return "Service", [
        series("Not good", "Requests per second, by cause.", PER_SECOND, missed),
        series("Refused or failed", "Requests per second, by outcome.", PER_SECOND, failed),
        listing("The last hour", "Requests of each tenant and model.", hour),
    ]


def tenants() -> Dashboard:
    """Tenant by tenant."""
    text = "Who uses what, and how well they are served. Tenants beyond `telemetry.tenants` are `other`."
    return board("tenants", "Tenants", text, use(), limits(), service())
