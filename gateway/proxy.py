"""The path of every inference request, from its first header to its last byte. One screen, read from top to bottom."""

from __future__ import annotations

from asyncio import sleep
from functools import partial
from typing import Protocol

from gateway import wire
from gateway.client import Client
from gateway.dispatch import Dispatcher, Slot
from gateway.doors import Doors
from gateway.errors import UpstreamFailed
from gateway.exchange import Exchange
from gateway.generation import Generation
from gateway.hedge import Hedge
from gateway.quota import Quota
from gateway.upstream import Upstream


class Gateway(Protocol):
    """What the path needs."""

    generation: Generation
    doors: Doors
    quota: Quota
    dispatcher: Dispatcher
    upstream: Upstream


async def proxy(gw: Gateway, client: Client, x: Exchange) -> None:
    """Raises GatewayError; what an error means for the client is `client.refuse`'s to say."""
    began = gw.generation
    tenant = began.keys.identify(client.raw_headers)  # 401
    gw.doors.enter(client.turn, tenant)  # 429
    call = wire.parse(x.endpoint, client.content_type, await client.body(), began.catalog, tenant)  # 400 404 413
    x.identify(tenant, client.address(call, x.request_id))
    async with client.present(), gw.quota.hold(x):  # 429           | settle
        while True:
            try:
                if (rule := gw.dispatcher.hedging(x)) is not None:
                    return await Hedge(gw.dispatcher, x, rule, partial(attempt, gw, client, x)).run()
                return await attempt(gw, client, x, gw.dispatcher.slot(x))
            except UpstreamFailed as failure:
                pause = gw.dispatcher.retry_pause(failure, x)
                if pause is None:
                    raise
            await sleep(pause)


async def attempt(gw: Gateway, client: Client, x: Exchange, slot: Slot) -> None:
    """One try on one backend."""
    assert x.call is not None
    async with (
        slot as place,  # 503           | leave
        gw.upstream.open(place, x.call) as reply,  # 502 504       | close
    ):
        await client.relay(reply, place, x)  # error frame
