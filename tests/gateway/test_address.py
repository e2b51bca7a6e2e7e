"""Listeners and backend URLs: normal forms, and what may not be a backend."""

from __future__ import annotations

from ipaddress import ip_address

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gateway.address import Address, backend_url, host_and_port, listener, name_server, off_limits, origin

STEADY = settings(deadline=None, derandomize=True)

NORMAL = {
    "http://10.0.0.11:8000": "http://10.0.0.11:8000",
    "HTTP://Host.Example:80/": "http://host.example",
    "https://host:443": "https://host",
    "https://host:80": "https://host:80",
    "http://h:8001/v1": "http://h:8001",
    "http://h:8001/v1/": "http://h:8001",
    "http://h/team-a/v1": "http://h/team-a",
    "http://h/team-a//": "http://h/team-a",
    "http://[::1]:8000": "http://[::1]:8000",
    "http://[0:0::1]": "http://[::1]",
    "http://host.:8000": "http://host:8000",
    "http://my_service": "http://my_service",
}
NOT_A_BACKEND = [
    "",
    "host:8000",
    "10.0.0.1",
    "//host",
    "ftp://host",
    "unix:///run/x",
    "http://",
    "http://:8000",
    "http://host:hunter2",
    "http://host:0",
    "http://host:70000",
    "http://host/?a=1",
    "http://host/#f",
    "http://host/#",
    "http://ho st",
    "http://host\n",
    "http://host\\@x",
    "http://hôst",
    "http://a..b",
    "http://-a",
    "http://[::1",
    "http://[fe80::1%25eth0]",
    "http://[::1%25lo]",
    "http://%31.1.1.1",
    "http://1.2.3",
    "http://256.1.1.1",
]
METADATA = [
    "http://169.254.169.254",
    "http://169.254.0.1:80/latest",
    "http://169.254.169.254.",
    "http://[fd00:ec2::254]",
    "http://[fe80::1]",
    "http://[::ffff:169.254.169.254]",
    "http://2852039166",  # the same address as one number
    "http://0xA9FEA9FE",
    "http://0251.0376.0251.0376",
    "http://169.254.43518",
    "http://100.100.100.200",
    "http://metadata.google.internal",
    "http://METADATA.google.internal.:80/computeMetadata",
    "http://metadata",
    "http://instance-data.ec2.internal",
]


@pytest.mark.parametrize(("text", "normal"), NORMAL.items())
def test_backend_urls_have_one_normal_form(text: str, normal: str) -> None:
    """Two ways to write a backend are the same backend, and the normal form is stable."""
    assert backend_url(text) == normal
    assert backend_url(normal) == normal


@pytest.mark.parametrize("text", NOT_A_BACKEND + METADATA)
def test_refuses_what_is_not_a_backend_without_repeating_it(text: str) -> None:
    """No scheme, no host, no port, extra parts, disguised addresses, link-local and metadata addresses."""
    with pytest.raises(ValueError) as caught:
        backend_url(text)
    assert len(text) < 15 or text not in str(caught.value)


@pytest.mark.parametrize("text", ["http://user:hunter2@host", "http://hunter2@host", "https://hunter2:@host/v1"])
def test_credentials_in_a_backend_url_are_refused_and_not_shown(text: str) -> None:
    """The fix is named, the password is not."""
    with pytest.raises(ValueError, match="api_key by reference") as caught:
        backend_url(text)
    assert "hunter2" not in str(caught.value)


@pytest.mark.parametrize("text", ["http://0.0.0.0:8000", "http://[::]", "http://224.0.0.1"])
def test_addresses_that_cannot_be_connected_to_are_refused(text: str) -> None:
    """0.0.0.0 is where one listens."""
    with pytest.raises(ValueError, match=r"127\.0\.0\.1"):
        backend_url(text)


def test_resolved_addresses_can_be_checked_too() -> None:
    """A name may resolve to what may not be written."""
    assert off_limits(ip_address("169.254.1.1"))
    assert off_limits(ip_address("::ffff:169.254.1.1"))
    assert not off_limits(ip_address("10.0.0.1"))
    assert not off_limits(ip_address("fd00::1"))


@STEADY
@given(st.text(max_size=40).map(lambda tail: "http://" + tail))
def test_any_url_is_normalised_or_refused(text: str) -> None:
    """Nothing but ValueError comes out, and what comes out is in normal form."""
    try:
        url = backend_url(text)
    except ValueError:
        return
    assert backend_url(url) == url
    assert "@" not in url.partition("/")[0]


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:8080", "127.0.0.1", 8080, True),
        ("127.8.0.1:0", "127.8.0.1", 0, True),
        ("localhost:8080", "localhost", 8080, True),
        ("[::1]:8080", "::1", 8080, True),
        ("0.0.0.0:80", "0.0.0.0", 80, False),
        ("[::]:80", "::", 80, False),
        ("10.0.0.1:80", "10.0.0.1", 80, False),
        ("Gateway:80", "gateway", 80, False),
    ],
)
def test_reads_listeners(text: str, host: str, port: int, loopback: bool) -> None:
    """Host, port, and whether only this machine can reach it."""
    address = listener(text)
    assert (address.host, address.port, address.loopback) == (host, port, loopback)
    assert listener(str(address)) == address


@pytest.mark.parametrize("text", ["", "8080", ":8080", "::1:8080", "host", "host:", "host:65536", "a b:1", "1.2.3:80"])
def test_refuses_other_listeners_with_examples(text: str) -> None:
    """A bare port would leave the question who can reach it."""
    with pytest.raises(ValueError, match=r"HOST:PORT, such as 127\.0\.0\.1:8080"):
        listener(text)


@pytest.mark.parametrize(
    ("one", "other", "clash"),
    [
        ("127.0.0.1:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "127.0.0.1:81", False),
        ("127.0.0.1:0", "127.0.0.1:0", False),
        ("0.0.0.0:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "[::]:80", True),
        ("localhost:80", "127.0.0.1:80", True),
        ("127.0.0.1:80", "127.0.0.2:80", False),
    ],
)
def test_knows_which_listeners_clash(one: str, other: str, clash: bool) -> None:
    """The same port twice, unless the hosts differ and neither is a wildcard."""
    assert Address.clashes(listener(one), listener(other)) is clash
    assert Address.clashes(listener(other), listener(one)) is clash


def test_origins_and_service_names() -> None:
    """An origin has no path; a service has a port."""
    assert origin("https://app.example:8443") == "https://app.example:8443"
    assert origin("*") == "*"
    assert host_and_port("vllm.models.svc:8000") == "vllm.models.svc:8000"
    for wrong in ("app.example", "https://app.example/", "https://App.example", ""):
        with pytest.raises(ValueError):
            origin(wrong)
    for wrong in ("vllm", "vllm:", "vllm:0", "vllm:99999", "a b:1", "http://vllm:80"):
        with pytest.raises(ValueError):
            host_and_port(wrong)


def test_a_name_server_is_an_address() -> None:
    """Its name could not be looked up."""
    assert name_server("127.0.0.1:8600") == "127.0.0.1:8600"
    assert name_server("[fd00::1]:53") == "[fd00::1]:53"
    for wrong in ("127.0.0.1", "ns.svc:53", "127.0.0.1:0", "fd00::1:53", "127.1:53", "1.2.3.4:99999"):
        with pytest.raises(ValueError):
            name_server(wrong)
