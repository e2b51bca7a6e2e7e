"""The dashboards, written as JSON to `dashboards/` beside this file.

python -m deploy.grafana.build
"""

from __future__ import annotations

from pathlib import Path

from grafana_foundation_sdk.cog.encoder import JSONEncoder

from deploy.grafana.internals import internals
from deploy.grafana.latency import latency
from deploy.grafana.overview import overview
from deploy.grafana.pools import pools
from deploy.grafana.queues import queues
from deploy.grafana.tenants import tenants

DIR = Path(__file__).parent / "dashboards"
BOARDS = (overview, latency, queues, pools, tenants, internals)


def texts() -> dict[str, str]:
    """Every file by its name."""
    built = (make().build() for make in BOARDS)
    return {f"{told.uid}.json": JSONEncoder(sort_keys=True, indent=2).encode(told) + "\n" for told in built}


if __name__ == "__main__":
    DIR.mkdir(exist_ok=True)
    for name, text in texts().items():
        (DIR / name).write_text(text)
