"""Where backends are found at run time: a name in DNS, or the endpoints of a Kubernetes service."""

from __future__ import annotations

import asyncio
import json
import os
import ssl
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from ipaddress import ip_address
from pathlib import Path
from random import Random
from typing import Any, Protocol

import dns.asyncresolver
import dns.exception
import dns.resolver
import httpx

from gateway.address import off_limits

LIMIT_S = 3.0  # for an answer of a name server
SHORTEST_S, LONGEST_S = 1.0, 30.0  # between two resolutions, whatever the TTL says
AGAIN_S = 1.0  # after a source did not answer; what is known stays known
WATCH_S = 240  # asked of the API server, which ends a watch after so long by itself
SILENCE_S = 300.0  # a watch that is silent for longer is dead
ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")


class Undiscoverable(Exception):
    """Nobody can be asked from here."""


@dataclass(frozen=True, slots=True)
class Endpoint:
    """One backend. `ready`: it takes new work; otherwise it only finishes what it has."""

    host: str
    port: int
    ready: bool = True

    @property
    def url(self) -> str:
        return f"http://[{self.host}]:{self.port}" if ":" in self.host else f"http://{self.host}:{self.port}"


Tell = Callable[[list[Endpoint]], None]


class Source(Protocol):
    """Tells all endpoints, now and whenever they change, for ever. While it cannot find out it tells nothing."""

    async def watch(self, tell: Tell) -> None: ...


def allowed(endpoints: Iterable[Endpoint]) -> list[Endpoint]:
    """Without duplicates, and without addresses where no backend may be: a name server must not send prompts there."""
    merged: dict[tuple[str, int], Endpoint] = {}
    for each in endpoints:
        ip = ip_address(each.host)
        if not (off_limits(ip) or ip.is_unspecified or ip.is_multicast):
            known = merged.get((each.host, each.port))
            merged[each.host, each.port] = each if known is None or each.ready else known
    return sorted(merged.values(), key=lambda each: (each.host, each.port))


class Dns:
    """Every address (A and AAAA) of a name; where the name begins with `_`, every target of its SRV records with its
    own port. Looked up again when the TTL is over."""

    def __init__(self, name: str, port: int, nameserver: str | None = None) -> None:
        """`nameserver`: its address and port; None for those of the system. Raises Undiscoverable."""
        self._name = name
        self._port = port
        self._resolver = _resolver(nameserver)

    def __repr__(self) -> str:
        return f"<Dns {self._name}:{self._port}>"

    async def watch(self, tell: Tell) -> None:
        task = asyncio.current_task()
        while True:
            found, wait_s = None, AGAIN_S
            with suppress(dns.exception.DNSException, OSError):
                found, ttl_s = await self._look()
                wait_s = min(LONGEST_S, max(SHORTEST_S, ttl_s))
            # Python 3.11's wait_for, which dnspython uses, swallows a cancellation that comes with the answer.
            if task is not None and task.cancelling():
                raise asyncio.CancelledError
            if found is not None:
                tell(allowed(found))
            await asyncio.sleep(wait_s)

    async def _look(self) -> tuple[list[Endpoint], float]:
        """The endpoints now, and for how many seconds they hold."""
        if not self._name.startswith("_"):
            hosts, ttl_s = await self._addresses(self._name)
            return [Endpoint(host, self._port) for host in hosts], ttl_s
        answer = await self._resolved(self._name, "SRV")
        found: list[Endpoint] = []
        least_s = float(answer.rrset.ttl) if answer and answer.rrset else SHORTEST_S
        for record in answer or ():
            hosts, ttl_s = await self._addresses(record.target.to_text())
            least_s = min(least_s, ttl_s)
            found += [Endpoint(host, record.port) for host in hosts]
        return found, least_s

    async def _addresses(self, name: str) -> tuple[list[str], float]:
        answers = [await self._resolved(name, kind) for kind in ("A", "AAAA")]
        hosts = [record.address for answer in answers for record in answer or ()]
        if not hosts:
            return await self._known_here(name), SHORTEST_S
        return hosts, float(min(answer.rrset.ttl for answer in answers if answer and answer.rrset))

    async def _resolved(self, name: str, kind: str) -> Any:
        """None where there are no such records. Raises DNSException where nobody could tell."""
        try:
            return await self._resolver.resolve(name, kind, search=True, lifetime=LIMIT_S, raise_on_no_answer=False)
        except dns.resolver.NXDOMAIN:
            return None

    @staticmethod
    async def _known_here(name: str) -> list[str]:
        """What is in no zone may be in the hosts file, as in a compose network."""
        try:
            found = await asyncio.get_running_loop().getaddrinfo(name, None)
        except OSError:
            return []
        return [str(address[0]) for *_, address in found]


def _resolver(nameserver: str | None) -> dns.asyncresolver.Resolver:
    if nameserver is not None:
        address, _, port = nameserver.rpartition(":")
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port = [address.strip("[]")], int(port)
        return resolver
    try:
        return dns.asyncresolver.Resolver()
    except dns.exception.DNSException as error:
        raise Undiscoverable(f"there is no name server to ask: {error}") from error


@dataclass(frozen=True, slots=True)
class Cluster:
    """The API server, and who asks it. The token is read anew for each request: it is renewed every hour."""

    url: str
    token: Path | None = None
    authority: Path | None = None

    @staticmethod
    def inside(environ: Mapping[str, str] = os.environ) -> Cluster:
        """As a pod knows it. Raises Undiscoverable where this is none."""
        host = environ.get("KUBERNETES_SERVICE_HOST")
        if not host:
            raise Undiscoverable("KUBERNETES_SERVICE_HOST is not set: discovery by kubernetes works in a cluster only")
        shown = f"[{host}]" if ":" in host else host
        port = environ.get("KUBERNETES_SERVICE_PORT", "443")
        return Cluster(f"https://{shown}:{port}", ACCOUNT / "token", ACCOUNT / "ca.crt")

    def client(self) -> httpx.AsyncClient:
        trust = ssl.create_default_context(cafile=str(self.authority)) if self.authority else True
        return httpx.AsyncClient(
            base_url=self.url, verify=trust, trust_env=False, timeout=httpx.Timeout(SILENCE_S, connect=5.0)
        )

    def headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self.token.read_text().strip()}"} if self.token else {}


class Expired(Exception):
    """The API server has forgotten the version that was asked for: everything must be listed again."""


@dataclass(slots=True)
class Slices:
    """The EndpointSlices of one service, by name."""

    port: int
    slices: dict[str, list[Endpoint]] = field(default_factory=dict)
    version: str = ""

    def endpoints(self) -> list[Endpoint]:
        """All of them together; slices may overlap while they are rebalanced."""
        return allowed(each for endpoints in self.slices.values() for each in endpoints)

    def listed(self, body: Mapping[str, Any]) -> None:
        """A whole list."""
        self.slices = {item["metadata"]["name"]: self._read(item) for item in body.get("items") or ()}
        self.version = body["metadata"]["resourceVersion"]

    def changed(self, event: Mapping[str, Any]) -> bool:
        """One event of a watch. Returns whether there is something to tell. Raises Expired."""
        kind, item = event["type"], event["object"]
        if kind == "ERROR":
            raise Expired(item.get("message", ""))
        self.version = item["metadata"]["resourceVersion"]
        if kind == "BOOKMARK":
            return False
        name = item["metadata"]["name"]
        if kind == "DELETED":
            self.slices.pop(name, None)
        else:
            self.slices[name] = self._read(item)
        return True

    def _read(self, item: Mapping[str, Any]) -> list[Endpoint]:
        """Ready: new work. Serving but not ready (it terminates): what it has. Neither: gone. Absent means ready."""
        found = []
        if item.get("addressType") == "FQDN":
            return []
        for each in item.get("endpoints") or ():
            conditions = each.get("conditions") or {}
            ready = conditions.get("ready") is not False and not conditions.get("terminating")
            serving = conditions.get("serving", conditions.get("ready")) is not False
            if ready or serving:
                found += [Endpoint(address, self.port, ready) for address in each.get("addresses") or () if address]
        return found


class Kubernetes:
    """The EndpointSlices of a service: listed once, then watched; listed again whenever a watch broke, since what
    happened meanwhile would be missed."""

    def __init__(self, cluster: Cluster, namespace: str, service: str, port: int, rng: Random) -> None:
        self._cluster = cluster
        self._path = f"/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices"
        self._selector = f"kubernetes.io/service-name={service}"
        self._port = port
        self._rng = rng

    def __repr__(self) -> str:
        return f"<Kubernetes {self._selector}>"

    async def watch(self, tell: Tell) -> None:
        async with self._cluster.client() as http:
            while True:
                try:
                    await self._follow(http, tell)
                except (Expired, httpx.HTTPError, OSError, ValueError, KeyError, TypeError, AttributeError):
                    await self._pause()  # JSON of any shape may come

    async def _pause(self) -> None:
        """Whatever the API server says, and how soon, it is not asked in a tight loop."""
        await asyncio.sleep(AGAIN_S * self._rng.uniform(0.5, 1.5))

    async def _follow(self, http: httpx.AsyncClient, tell: Tell) -> None:
        """List, then watch until it breaks. Raises Expired or what the connection raised."""
        slices = Slices(self._port)
        answer = await http.get(
            self._path, params={"labelSelector": self._selector}, headers=self._cluster.headers(), timeout=10.0
        )
        answer.raise_for_status()
        slices.listed(answer.json())
        tell(slices.endpoints())
        while True:
            async for event in self._events(http, slices.version):
                if slices.changed(event):
                    tell(slices.endpoints())
            await self._pause()

    async def _events(self, http: httpx.AsyncClient, version: str) -> AsyncIterator[Mapping[str, Any]]:
        asked = {
            "labelSelector": self._selector,
            "watch": "1",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        async with http.stream("GET", self._path, params=asked, headers=self._cluster.headers()) as answer:
            if answer.status_code == httpx.codes.GONE:
                raise Expired("410")
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.strip():
                    yield json.loads(line)
