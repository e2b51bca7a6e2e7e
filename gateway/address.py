"""Where the gateway listens, and where its backends are: checked when read, so that nothing later needs to."""

from __future__ import annotations

import re
from ipaddress import IPv4Address, IPv6Address, ip_address
from typing import Annotated, NamedTuple
from urllib.parse import urlsplit

from pydantic import AfterValidator, PlainSerializer, PlainValidator

from gateway.units import quoted

_HOST = re.compile(
    r"(?=.{1,253}\.?$)[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?(\.[a-z0-9_]([a-z0-9_-]*[a-z0-9_])?)*\.?", re.ASCII
)
# What a resolver would still take for an IPv4 address: 2852039166, 0xA9FEA9FE, 0251.254.43518
_DISGUISED = re.compile(r"(0x[0-9a-f]*|[0-9]+)(\.(0x[0-9a-f]*|[0-9]+))*\.?", re.ASCII)
_DEFAULT_PORTS = {"http": 80, "https": 443}
# What hands out credentials to whoever asks: of AWS (and of most others: link-local), Alibaba, Oracle; and their names
_METADATA = {IPv6Address("fd00:ec2::254"), IPv4Address("100.100.100.200"), IPv4Address("192.0.0.192")}
_METADATA_NAMES = {
    *("metadata", "metadata.google.internal", "metadata.goog"),
    *("instance-data", "instance-data.ec2.internal", "metadata.tencentyun.com", "metadata.azure.internal"),
}

A_LISTENER = "an address to listen on is HOST:PORT, such as 127.0.0.1:8080, 0.0.0.0:8080 or [::1]:8080"


class Address(NamedTuple):
    """A host and port to listen on; port 0 lets the system choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def loopback(self) -> bool:
        """Whether only this machine can reach it."""
        ip = _ip(self.host)
        return self.host == "localhost" if ip is None else ip.is_loopback

    def clashes(self, other: Address) -> bool:
        """Whether both cannot be bound at once."""
        ips = [_ip("127.0.0.1" if host == "localhost" else host) for host in (self.host, other.host)]
        same = self.host == other.host or (ips[0] is not None and ips[0] == ips[1])
        return self.port == other.port != 0 and (same or any(ip is not None and ip.is_unspecified for ip in ips))


def _ip(host: str) -> IPv4Address | IPv6Address | None:
    try:
        return None if "%" in host else ip_address(host)  # no zones: they name an interface of one machine
    except ValueError:
        return None


def off_limits(ip: IPv4Address | IPv6Address) -> bool:
    """Whether no backend may be there: link-local addresses and cloud metadata services (they hand out credentials)."""
    inner = ip.ipv4_mapped if isinstance(ip, IPv6Address) else None
    return ip.is_link_local or ip in _METADATA or (inner is not None and off_limits(inner))


def listener(value: object) -> Address:
    """`host:port` as an Address."""
    if isinstance(value, Address):
        return value
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([^:\[\]]+)):([0-9]{1,5})", str(value), re.ASCII)
    host = found and (found[1] or found[2]).lower()
    if not found or not host or not _known_host(host) or int(found[3]) > 65535:
        raise ValueError(f"read {quoted(value)}: {A_LISTENER}")
    return Address(host, int(found[3]))


def _known_host(host: str) -> bool:
    """An IP address or a host name, and no disguised address."""
    return _ip(host) is not None or (not _DISGUISED.fullmatch(host) and _HOST.fullmatch(host) is not None)


def backend_url(text: str) -> str:
    """The base URL of a backend, normalised: lower case, no default port, no `/v1` (the gateway adds the path).

    Refuses anything but plain http(s) to a host that may be a backend; no message repeats the URL, which might
    carry credentials.
    """
    if not text.isascii() or not text.isprintable() or " " in text or "\\" in text:
        raise ValueError(
            "a URL holds no blanks, backslashes, control or non-ASCII characters (write the punycode name)"
        )
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        raise ValueError("this is not a URL: write http://host:port") from None
    if parts.scheme not in _DEFAULT_PORTS or not parts.netloc:
        raise ValueError("a backend's URL begins with http:// or https://, such as http://10.0.0.11:8000")
    if "@" in parts.netloc:
        raise ValueError(
            "a URL must not carry credentials: give the pool an api_key by reference (env:NAME or file:path)"
        )
    if "?" in text or "#" in text:
        raise ValueError("a backend's URL ends with its path: remove the query or fragment")
    if port == 0:
        raise ValueError("port 0 is not a port to connect to")
    host = _backend_host(parts.hostname or "")
    suffix = f":{port}" if port and port != _DEFAULT_PORTS[parts.scheme] else ""
    return f"{parts.scheme}://{host}{suffix}{re.sub(r'/*(/v1)?/*$', '', parts.path)}"


def _backend_host(host: str) -> str:
    ip = _ip(host.rstrip("."))
    if ip is None and not _known_host(host):
        raise ValueError("this is neither a host name nor an IP address in its usual form: write http://host:port")
    if host.rstrip(".") in _METADATA_NAMES or (ip is not None and off_limits(ip)):
        raise ValueError("link-local addresses and cloud metadata services cannot be backends")
    if ip is not None and (ip.is_unspecified or ip.is_multicast):
        raise ValueError("this address cannot be connected to: for this machine write 127.0.0.1")
    return f"[{ip}]" if isinstance(ip, IPv6Address) else host.rstrip(".")


def origin(text: str) -> str:
    """An origin as browsers send it: `https://app.example`, or `*` for any."""
    if text != "*" and not re.fullmatch(r"https?://[a-z0-9.\[\]:-]+", text, re.ASCII):
        raise ValueError("an origin is scheme and host in lower case, such as https://app.example (no path), or *")
    return text


def host_and_port(text: str) -> str:
    """`name:port`, the name of a service in DNS."""
    host, _, port = text.rpartition(":")
    if host.lower().rstrip(".") in _METADATA_NAMES:
        raise ValueError("cloud metadata services cannot be backends")
    if not _known_host(host.lower()) or not re.fullmatch(r"[0-9]{1,5}", port, re.ASCII) or not 0 < int(port) < 65536:
        raise ValueError(f"read {quoted(text)}: a service is NAME:PORT, such as vllm.models.svc:8000")
    return text


def name_server(text: str) -> str:
    """`address:port` of a name server: a name would have to be looked up itself."""
    found = re.fullmatch(r"(?:\[([0-9A-Fa-f:.]+)\]|([0-9.]+)):([0-9]{1,5})", text, re.ASCII)
    if not found or _ip(found[1] or found[2]) is None or not 0 < int(found[3]) < 65536:
        raise ValueError(f"read {quoted(text)}: a name server is ADDRESS:PORT, such as 127.0.0.1:8600")
    return text


Listener = Annotated[Address, PlainValidator(listener), PlainSerializer(str, return_type=str, when_used="json")]
BackendUrl = Annotated[str, AfterValidator(backend_url)]
Origin = Annotated[str, AfterValidator(origin)]
DnsName = Annotated[str, AfterValidator(host_and_port)]
NameServer = Annotated[str, AfterValidator(name_server)]
