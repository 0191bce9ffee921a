"""The page in headless Chromium: the key, the chat, and a grid that is what /debug/kv says."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.browser import CHROMIUM, Browser
from tests.server.running import Running

pytest.importorskip("websockets")
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium (apt-get install chromium)")
STATIC = Path(__file__).resolve().parents[2] / "octavo" / "server" / "static"

ASK = """(() => {{ document.getElementById('text').value = {text};
document.getElementById('ask').requestSubmit(); return true; }})()"""
GRID = "[...document.querySelectorAll('#grid i')].map(i => Number(i.dataset.owners))"


@pytest.fixture
def browser() -> Iterator[Browser]:
    made = Browser()
    yield made
    made.close()


def ask(browser: Browser, text: str) -> None:
    assert browser.run(ASK.format(text=json.dumps(text)))


@needs_browser
def test_chat_and_grid(browser: Browser, tmp_path: Path) -> None:
    options = ("--num-gpu-blocks-override", "300", "--max-model-len", "4096", "--max-num-seqs", "8")
    with Running(*options, fake="fake:15") as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.until("document.getElementById('state').textContent == 'ready'")
        browser.until("document.querySelectorAll('#grid i').length == 300")
        assert browser.run("document.getElementById('model').textContent")
        browser.run("document.getElementById('max-tokens').value = 400")
        ask(browser, "Hello <b>there</b>")
        browser.until("document.querySelectorAll('.assistant')[0]?.textContent.length > 10")
        first = browser.run("document.querySelector('.assistant').textContent")
        browser.until(f"document.querySelector('.assistant').textContent.length > {len(first) + 20}")
        assert browser.run("document.querySelector('.user').textContent") == "Hello <b>there</b>"
        browser.until("Number(document.getElementById('grid').dataset.used) > 0")
        for _ in range(20):  # the engine goes on between the two looks
            before, shown = server.call("/debug/kv").json, browser.run(GRID)
            if shown == before["owners"]:
                break
            browser.until("new Promise(go => setTimeout(() => go(true), 150))")
        assert sum(count > 0 for count in shown) == sum(count > 0 for count in before["owners"]) > 0
        assert shown == before["owners"]
        browser.picture(tmp_path / "page.png")
        browser.run("document.getElementById('stop').click()")
        browser.until("document.getElementById('stop').hidden")
        server.idle()
        browser.until("Number(document.getElementById('grid').dataset.used) == 0")
        assert browser.run(GRID) == [0] * 300
        assert browser.log == []


@needs_browser
def test_the_page_asks_for_the_key(browser: Browser) -> None:
    key = "key-0123456789"
    with Running("--api-key", key, key=key) as server:
        browser.open(f"http://127.0.0.1:{server.port}/")
        browser.until("document.getElementById('state').textContent.includes('key is needed')")
        ask(browser, "Hello")
        browser.until("document.querySelector('.error')?.textContent.includes('key')")
        browser.run(f"document.getElementById('key').value = '{key}'")
        browser.run("document.getElementById('key-form').requestSubmit()")
        browser.until("document.getElementById('state').textContent == 'ready'")
        ask(browser, "Hello again")
        browser.until("[...document.querySelectorAll('.assistant')].at(-1).textContent.length > 3")
        assert key not in browser.run("document.documentElement.outerHTML")


def test_static_files_hold_no_data_and_load_nothing_from_elsewhere(fake: Running) -> None:
    for path, name in (("/", "index.html"), ("/static/page.js", "page.js"), ("/static/page.css", "page.css")):
        reply = fake.call(path)
        assert reply.status == 200 and reply.body == (STATIC / name).read_bytes()
        assert "default-src 'none'" in reply.headers["content-security-policy"]
        assert b"http://" not in reply.body and b"https://" not in reply.body and b"innerHTML" not in reply.body
    for path in ("/static/", "/static/../app.py", "/static/%2e%2e/app.py", "/static/page.html", "/page.js"):
        assert fake.call(path).status == 404
