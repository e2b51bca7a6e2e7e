"""What queries are put together from: filters by the variables, rates, quantiles."""

from __future__ import annotations

from deploy.grafana.panels import Line

R = "[$__rate_interval]"
MODEL = '{model=~"$model",class=~"$class"}'
ANY_CLASS = '{model=~"$model"}'
WHOSE = '{model=~"$model",tenant=~"$tenant",class=~"$class"}'
OWNED = '{model=~"$model",tenant=~"$tenant"}'
POOL = '{pool=~"$pool"}'
QUEUE = '{pool=~"$pool",class=~"$class"}'
ROOM = '{model=~"$model",class=~"$class",fault="capacity"}'


def quantiles(name: str, by: str, filters: str, *of: float) -> list[Line]:
    """A line for each quantile of a histogram and each value of a label."""
    return [
        (
            f"histogram_quantile({each}, sum by ({by}, le) (rate({name}_bucket{filters}{R})))",
            f"{{{{{by}}}}} p{round(each * 100)}",
        )
        for each in of
    ]


def rate(name: str, by: str, filters: str) -> str:
    """A counter per second."""
    return f"sum by ({by}) (rate({name}{filters}{R}))"


def rates(name: str, by: str, filters: str) -> Line:
    """The same as a line, called by its labels."""
    return rate(name, by, filters), " ".join(f"{{{{{label.strip()}}}}}" for label in by.split(","))


def total(name: str, filters: str) -> str:
    """The same over all labels; 0 before anything was counted."""
    return f"(sum(rate({name}{filters}{R})) or vector(0))"
