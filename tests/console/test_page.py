"""The console in a real Chromium: it shows what the API says, changes what it is told to, and everybody can use it."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import ExitStack
from importlib.resources import files
from pathlib import Path
from typing import Any

import httpx
import pytest

from gateway.page import FILES
from tests.console.conftest import ADMIN, DEAD, TOKEN, busy, load, look, one
from tests.service import Service, started, tenant

WAIT_MS = 60_000


@pytest.fixture
def page(browser: Any, gateway: Service) -> Iterator[Any]:
    """The page in a tab of its own, before the token; nothing that it does may break its own policy."""
    context = browser.new_context(viewport={"width": 1440, "height": 900})
    context.set_default_timeout(WAIT_MS)
    opened = context.new_page()
    faults: list[str] = []
    opened.on("pageerror", lambda error: faults.append(str(error)))
    opened.on("console", lambda line: faults.append(line.text) if line.type == "error" else None)
    opened.goto(f"{gateway.admin}/console")
    yield opened
    context.close()
    assert [fault for fault in faults if "status of 40" not in fault] == []


def enter(page: Any) -> None:
    page.fill("#token", TOKEN)
    page.click("#login button")
    page.wait_for_selector("#link.live")


def texts(page: Any, selector: str) -> list[str]:
    return [text.strip() for text in page.locator(selector).all_inner_texts()]


def cells(page: Any, body: str) -> list[list[str]]:
    return [texts(page, f"#{body} tr:nth-child({i + 1}) td") for i in range(page.locator(f"#{body} tr").count())]


def test_it_shows_what_the_api_says(page: Any, gateway: Service) -> None:
    """Backends and their states, refusals, tenants against limits, and the latest bad requests, in their order."""
    gateway.eventually(gateway.settled)
    enter(page)
    now = look(gateway)
    assert texts(page, ".backend .address") == [each["backend"] for each in now["backends"]]
    assert texts(page, ".backend .tags .tag:first-child") == [each["state"] for each in now["backends"]]
    assert {each["state"] for each in now["backends"]} == {"up", "down"}
    assert {row[0]: row[2] for row in cells(page, "refusals")} == {
        each["reason"]: str(each["total"]) for each in now["refusals"]
    }
    assert {"no_backend", "model_not_found"} <= {each["reason"] for each in now["refusals"]}
    assert [row[0] for row in cells(page, "tenants")] == [each["tenant"] for each in now["tenants"]]
    assert "globex <b>" in texts(page, "#tenants td:first-child")
    acme = next(row for row in cells(page, "tenants") if row[0] == "acme")
    assert "of 600" in acme[3] and "of 40" in acme[3] and "of 200,000" in acme[3]
    shown = [row[1] for row in cells(page, "recent")]
    assert shown == [
        f"slow: {row['cause']}" if row["outcome"] == "ok" else row["outcome"] for row in now["recent"][:15]
    ]
    assert "no_backend" in shown and any(word.startswith("slow: ") for word in shown)


def test_what_waits_is_seen_while_it_waits(page: Any, gateway: Service) -> None:
    """By class and by tenant; the bar of a full backend is full."""
    enter(page)
    with busy(gateway):
        page.wait_for_function("document.querySelectorAll('#waiting tr:not(.none)').length === 2")
        rows = cells(page, "waiting")
        assert {row[0] for row in rows} == {"acme", "globex <b>"} and sum(int(row[3]) for row in rows) == 3
        assert ["small", "interactive", "3"] in [row[:3] for row in cells(page, "queues")]
        assert "2 of 2" in " ".join(texts(page, ".bar .value"))
    page.wait_for_selector("#waiting tr.none")


def test_it_is_live(page: Any, gateway: Service) -> None:
    """What happens is there within seconds, without a reload."""
    enter(page)
    before = page.locator("#recent tr").first.get_attribute("data-key")
    load(gateway)
    page.wait_for_function(
        "before => document.querySelector('#recent tr').dataset.key !== before", arg=before, timeout=WAIT_MS
    )


def test_a_backend_is_drained_when_that_is_confirmed(page: Any, gateway: Service) -> None:
    """Not when it is not; and undrained again."""
    enter(page)
    url = look(gateway)["backends"][0]["backend"]
    card = page.locator(".backend").first

    def state() -> str:
        return next(str(each["state"]) for each in look(gateway)["backends"] if each["backend"] == url)

    card.get_by_role("button").click()
    assert url in page.inner_text("#confirm-title")
    page.click("#confirm-no")
    assert state() == "up"
    card.get_by_role("button").click()
    page.click("#confirm-yes")
    card.get_by_text("draining").wait_for()
    assert state() == "draining"
    card.get_by_role("button", name="Undrain").click()
    page.click("#confirm-yes")
    card.get_by_text("up", exact=True).wait_for()
    assert state() == "up"


def test_a_bad_request_opens_to_its_story(page: Any, gateway: Service) -> None:
    """Where its time went, where it went and why, as the API says; and no prompt."""
    assert one(gateway, 0, "strict")
    enter(page)
    row = next(each for each in look(gateway)["recent"] if each["outcome"] == "ok")
    page.locator(f"#recent tr[data-key='{row['number']}'] button").click()
    page.wait_for_selector("#request[open]")
    told = httpx.get(f"{gateway.admin}/admin/recent/{row['number']}", headers=ADMIN).json()
    text = page.inner_text("#request")
    assert told["request_id"] in text and told["attempts"][0]["backend"] in text
    assert [item.split()[0] for item in texts(page, ".legend li")] == [*told["timeline"], "total"]
    considered = told["attempts"][0]["considered"]
    rows = [row.split() for row in texts(page, "#request tbody tr")]
    assert [(row[0], float(row[-1])) for row in rows] == [(each["backend"], each["price"]) for each in considered]
    assert considered[0]["price"] > 0 and told["routing"] == "price"
    taken = next(row for row in rows if "taken" in row)
    assert "Seconds of prefill" in text and taken[0] == told["attempts"][0]["backend"]
    assert sum(told["timeline"].values()) == pytest.approx(told["total_ms"], abs=0.1)
    assert "secret" not in str(told) and "secret" not in page.content()
    page.keyboard.press("Escape")
    assert not page.locator("#request").is_visible()


def test_the_keyboard_is_enough(page: Any, gateway: Service) -> None:
    """From the token to a confirmation and back; the focus survives what happens every second."""
    page.keyboard.type(TOKEN)
    page.keyboard.press("Enter")
    page.wait_for_selector("#link.live")
    for _ in range(10):
        page.keyboard.press("Tab")
        if (page.evaluate("document.activeElement.getAttribute('aria-label')") or "").startswith("Drain"):
            break
    label = page.evaluate("document.activeElement.getAttribute('aria-label')")
    assert label.startswith("Drain http://")
    page.wait_for_timeout(2500)
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == label
    page.keyboard.press("Enter")
    page.wait_for_selector("#confirm[open]")
    assert page.evaluate("document.activeElement.id") == "confirm-no"
    page.keyboard.press("Escape")
    assert page.evaluate("document.activeElement.getAttribute('aria-label')") == label


def test_a_wrong_token_is_told_and_a_right_one_kept_in_the_tab(page: Any, gateway: Service) -> None:
    """Nowhere else: no cookie, no address, nothing that outlives the tab."""
    page.fill("#token", "wrong")
    page.click("#login button")
    page.get_by_text("missing or wrong").wait_for()
    page.fill("#token", "tökén")
    page.click("#login button")
    page.get_by_text("No header can carry this").wait_for()
    assert page.evaluate("sessionStorage.length") == 0
    enter(page)
    kept = page.evaluate("[sessionStorage.length, localStorage.length, document.cookie, location.search]")
    assert kept == [1, 0, "", ""]
    page.reload()
    page.wait_for_selector("#link.live")
    page.click("#forget")
    page.wait_for_selector("#token")
    assert page.evaluate("sessionStorage.length") == 0


def test_a_page_in_the_background_is_not_fed(page: Any, gateway: Service) -> None:
    """A tab that is not seen ends its stream, and takes it up again."""
    enter(page)
    page.evaluate("Object.defineProperty(document, 'hidden', {value: true, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    before = page.inner_text("#recent")
    load(gateway)
    page.wait_for_timeout(2500)
    assert page.inner_text("#recent") == before
    page.evaluate("Object.defineProperty(document, 'hidden', {value: false, configurable: true})")
    page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    page.wait_for_function("before => document.querySelector('#recent').innerText !== before", arg=before)


OUTSIDE = """() => {
  const found = [];
  for (const each of document.querySelectorAll("header, section, dialog[open]")) {
    const right = each.getBoundingClientRect().right;
    for (const inner of each.querySelectorAll("*:not(.unseen):not(svg *)"))
      if (inner.getBoundingClientRect().right > right + 1) found.push(inner.outerHTML.slice(0, 150));
  }
  return found;
}"""


@pytest.mark.parametrize("width", [360, 768, 1024, 1440])
def test_nothing_is_cut_off(page: Any, gateway: Service, width: int) -> None:
    """On a telephone and on a wide screen the page scrolls in one direction only, and nothing leaves its frame."""
    page.set_viewport_size({"width": width, "height": 800})
    enter(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []
    page.locator("#recent button").first.click()
    page.wait_for_selector("#request[open]")
    assert page.evaluate("document.querySelector('#request').scrollWidth") <= width
    assert page.evaluate(OUTSIDE) == []


@pytest.mark.parametrize("width", [360, 1440])
def test_much_is_shown_in_little_room(browser: Any, tmp_path: Path, width: int) -> None:
    """Of fifty backends, of two hundred tenants and of long names: a few screens, a count of the rest, and a button."""
    long = "organisation/" + "a-long-name-" * 9
    told = {
        "server": {"admin_token": "file:token"},
        "pools": {"p": {"backends": [{"url": f"{DEAD}{number:03d}"} for number in range(50)]}},
        "models": {long: {"pool": "p"}},
        "tenants": {f"{long}{n}": tenant(f"key-{n}", limits={"requests_per_minute": 60}) for n in range(200)},
        "security": {"secret": "file:salt"},
    }
    with ExitStack() as stack:
        service = started(stack, tmp_path, told, salt="x" * 32, token=TOKEN)
        asked = {"model": long, "messages": [{"role": "user", "content": "Hello"}]}
        headers = {"authorization": "Bearer key-7"}
        assert httpx.post(f"{service.api}/v1/chat/completions", json=asked, headers=headers, timeout=60).is_error
        page = browser.new_page(viewport={"width": width, "height": 800})
        page.set_default_timeout(WAIT_MS)
        page.goto(f"{service.admin}/console")
        enter(page)
        page.wait_for_selector("#recent button")
        assert page.evaluate(OUTSIDE) == [] and page.evaluate("document.documentElement.scrollWidth") <= width
        assert page.locator(".backend").count() == 12 and page.locator("#tenants tr").count() == 10
        assert page.evaluate("document.documentElement.scrollHeight") < (8000 if width == 360 else 3000)
        assert "150 more are not sent" in page.inner_text("main")
        page.get_by_role("button", name="Show all 50, these first").click()
        assert page.locator(".backend").count() == 50
        page.close()


def test_what_is_old_is_not_taken_for_what_is(browser: Any, tmp_path: Path) -> None:
    """A gateway that stands still, and one that has gone: the page says so and since when, and is there again when the
    gateway is."""
    told = {
        "server": {"admin_token": "file:token"},
        "pools": {"p": {"backends": [{"url": DEAD}]}},
        "models": {"m": {"pool": "p"}},
    }
    with ExitStack() as stack:
        with ExitStack() as first:
            service = started(first, tmp_path, told, token=TOKEN)
            page = stack.enter_context(browser.new_context()).new_page()
            page.set_default_timeout(WAIT_MS)
            page.goto(f"{service.admin}/console")
            enter(page)
            os.kill(service.process.pid, signal.SIGSTOP)
            try:
                page.wait_for_selector("#link.lost")
                assert "says nothing" in page.inner_text("#notice") and " s ago" in page.inner_text("#notice")
                assert page.locator("#board.stale").is_visible()
            finally:
                os.kill(service.process.pid, signal.SIGCONT)
            page.wait_for_selector("#link.live")
            assert not page.locator("#notice").is_visible()
        page.wait_for_selector("#link.lost")
        page.get_by_text("cannot be reached").wait_for()
        admin = service.admin.removeprefix("http://")
        started(stack, tmp_path, told | {"server": told["server"] | {"admin": admin}}, token=TOKEN)
        page.wait_for_selector("#link.live")


def test_a_change_that_fails_says_why(page: Any, gateway: Service) -> None:
    """Where it was asked for, and the board stays what it is."""
    enter(page)
    page.route(
        "**/admin/backends/drain",
        lambda route: route.fulfill(status=400, body=json.dumps({"error": {"message": "It is not in the pool."}})),
    )
    page.locator(".backend button").first.click()
    page.click("#confirm-yes")
    page.get_by_text("It was not done: It is not in the pool.").wait_for()
    assert page.locator("#confirm[open]").is_visible() and page.locator("#link.live").is_visible()


def test_who_comes_sees_how_it_came(page: Any, gateway: Service) -> None:
    """The lines begin before anybody looked."""
    load(gateway)
    assert len([value for value in look(gateway)["history"]["requests_s"] if value is not None]) > 3
    enter(page)
    assert page.locator(".figure .line").first.get_attribute("d").count("L") > 3


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_fault(browser: Any, gateway: Service, scheme: str) -> None:
    """Of the page before the token, the board, and both dialogs. (Its own script needs a page without a policy.)"""
    axe = files("axe_playwright_python").joinpath("axe.min.js").read_text()
    context = browser.new_context(color_scheme=scheme, bypass_csp=True, reduced_motion="reduce")
    context.set_default_timeout(WAIT_MS)
    page = context.new_page()
    page.goto(f"{gateway.admin}/console")
    found: list[str] = []

    def check(where: str) -> None:
        page.evaluate(axe)
        for fault in page.evaluate("axe.run()")["violations"]:
            nodes = "; ".join(node["html"][:120] for node in fault["nodes"][:3])
            found.append(f"{where}: {fault['impact']} {fault['id']}: {nodes}")

    check("token")
    enter(page)
    check("board")
    page.locator("#recent button").first.click()
    page.wait_for_selector("#request[open]")
    check("request")
    page.keyboard.press("Escape")
    page.locator(".backend button").first.click()
    check("confirmation")
    context.close()
    assert found == []


def test_its_policy_is_strict(gateway: Service) -> None:
    """Nothing inline, nothing from elsewhere; what it reads needs the token in a header that no other site sends."""
    answer = httpx.get(f"{gateway.admin}/console")
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'none'") and "unsafe" not in policy and "http" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    shipped = {path.name: path.read_text() for path in files("gateway").joinpath("console").iterdir()}
    assert {f"/console/{name}" for name in shipped} - {"/console/index.html"} == FILES.keys() - {"/console"}
    for name, text in shipped.items():
        assert "//" not in text.replace("// ", "").replace("http://www.w3.org/2000/svg", ""), name
        assert "innerHTML" not in text and "style=" not in text and len(text.splitlines()) < 300
    for path in ("live", "recent/1"):
        assert httpx.get(f"{gateway.admin}/admin/{path}").status_code == 401
        assert httpx.get(f"{gateway.admin}/admin/{path}", cookies={"token": TOKEN}).status_code == 401
