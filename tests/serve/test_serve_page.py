"""The playground: the served page, and its behaviour in a browser.

The slow tests need Playwright for Python and Chromium (`pip install playwright`, `apt-get install chromium`;
$CHROMIUM is its path). They are skipped if either is missing.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from support import toys
from support.programs import PATIENCE_S
from support.serving import Served, serving, until
from support.stages import ThreadHosts
from verbatim import LLM, Cluster, Offload
from verbatim.serve.app import PAGE, places_of
from verbatim.serve.settings import ServeSettings

SMALL = dict(kv_memory="16MB", num_threads=1)
Opens = Callable[..., Any]


# ---- without a browser


@pytest.fixture(scope="module")
def plain() -> Iterator[Served]:
    with LLM(**SMALL) as llm, serving(llm) as server:
        yield server


def test_every_page_field_has_a_label() -> None:
    page = PAGE.read_text()
    fields = re.findall(r'<(?:input|textarea|select)\b[^>]*\bid="([^"]+)"', page)
    assert len(fields) > 12
    # A field may be inside its label.
    labels = "".join(re.findall(r"<label\b.*?</label>", page, re.DOTALL))
    assert [n for n in fields if f'for="{n}"' not in labels and f'id="{n}"' not in labels] == []


def test_page_is_self_contained(plain: Served) -> None:
    answer = plain.client.get("/")
    page = answer.text
    assert answer.status_code == 200 and page == PAGE.read_text()
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy and "connect-src 'self'" in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert page.replace("http://www.w3.org/2000/svg", "").count("//www.") == 0
    assert re.findall(r"https?:(?!//www\.w3\.org/2000/svg)", page) == []
    assert re.findall(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", page) == []
    for path in re.findall(r'ask\("(/[^"]*)"', page):
        assert plain.client.options(path).status_code != 404, path


def test_stream_sends_text_of_each_token_id_once(plain: Served) -> None:
    params = {"max_tokens": 20, "seed": 5, "logprobs": 3}
    body = {"prompt": "Once upon a time", "params": params, "return_tokens": True}
    whole = plain.post("/v1/generate", **body)
    deltas = plain.stream("/v1/generate", **body)
    sent = [name for delta in deltas for name in delta["tokens"]]
    assert len(sent) == len(set(sent))
    texts = {name: text for delta in deltas for name, text in delta["tokens"].items()}
    assert texts == whole["tokens"]
    output = whole["outputs"][0]
    top = (i for best in output["top_logprobs"] for i, _ in best)
    shown = {*whole["prompt_token_ids"], *output["token_ids"], *top}
    assert {int(name) for name in texts} == shown
    assert "".join(texts[str(i)] for i in output["token_ids"]) == output["text"]
    assert "tokens" not in plain.post("/v1/generate", **body | {"return_tokens": False})


def test_placement_map_shows_where_each_layer_lives(plain: Served, tmp_path: Path) -> None:
    (memory,) = plain.client.get("/v1/engine").json()["places"]
    assert memory["name"] == "memory" and memory["layers"] == [1.0] * 5
    assert memory["weight_bytes"] == plain.llm.info()["weight_bytes"]
    with LLM(placement=Offload(weights=(0, 50, 50)), **SMALL) as llm:
        info = llm.info()
        tiers = {place["name"]: place for place in places_of(info)}
        assert set(tiers) == {"cpu", "disk"}
        for parts in zip(*(place["layers"] for place in tiers.values()), strict=True):
            assert sum(parts) == pytest.approx(1)
        assert tiers["disk"]["weight_bytes"] == pytest.approx(info["weight_bytes"] / 2, rel=0.1)
    toys.make_toy("llama").save_pretrained(tmp_path)
    with LLM(tmp_path, placement=Cluster(stages=2, hosts=ThreadHosts("one", "two"))) as llm:
        first, second = places_of(llm.info())
    assert first["name"] == "stage 0 on one" and second["name"] == "stage 1 on two"
    assert [a + b for a, b in zip(first["layers"], second["layers"], strict=True)] == [1.0] * 3


# ---- in a browser


class Pace:
    """The minimum duration of a forward, so that a stream can be observed."""

    seconds = 0.0


@pytest.fixture(scope="module")
def pace() -> Pace:
    return Pace()


@pytest.fixture(scope="module")
def site(pace: Pace) -> Iterator[Served]:
    with LLM(draft="ngram", **SMALL) as llm:
        forward = llm.engine.runner.forward

        def paced(batch: Any) -> Any:
            time.sleep(pace.seconds)
            return forward(batch)

        llm.engine.runner.forward = paced  # type: ignore[method-assign]
        with serving(llm) as site:
            yield site


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    api = pytest.importorskip("playwright.sync_api", reason="Playwright is not installed")
    path = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("there is no Chromium here; $CHROMIUM may say where it is")
    quiet = "--disable-background-networking --disable-component-update --disable-sync"
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=path, args=["--no-sandbox", "--disable-gpu", *quiet.split()]
        )
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser: Any) -> Iterator[Callable[..., Any]]:
    """Open pages. Fails at the end if a console has errors or a request went to another host."""
    contexts, errors, hosts = [], [], set()
    expected: list[str] = []

    def opened(url: str, *, expect: str | None = None, **settings: Any) -> Any:
        context = browser.new_context(**{"viewport": {"width": 1280, "height": 860}} | settings)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(1000 * PATIENCE_S)
        expected.extend([expect] if expect else [])
        page.on("console", lambda m: errors.append(m.text) if m.type != "log" else None)
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.on("request", lambda request: hosts.add(urlsplit(request.url).hostname))
        page.goto(url)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert [text for text in errors if not any(each in text for each in expected)] == []
    assert hosts <= {"127.0.0.1", None}


def comes_true(page: Any, expression: str) -> None:
    """Wait until an expression is true. The page's CSP blocks Playwright's own wait, which uses eval."""
    until(lambda: page.evaluate(expression))


def run(page: Any, **fields: Any) -> Any:
    """Fill in the form, run it to the end, and return the pane."""
    for name, value in fields.items():
        page.fill(f"#{name}", str(value))
    before = page.evaluate("numRuns")
    page.keyboard.press("Control+Enter")
    comes_true(page, f"numRuns > {before}")
    return ended(page)


def ended(page: Any) -> Any:
    comes_true(page, "right !== null && going === null")
    return page.locator("#panes > .run").last


def open_ready(open_page: Opens, url: str, **settings: Any) -> Any:
    page = open_page(url, **settings)
    page.wait_for_selector("#places li")  # the form has the model's default sampling parameters
    page.locator("summary", has_text="Stop strings").click()
    return page


def start_long(page: Any, pace: Pace) -> None:
    """Start a run that goes on until it is stopped."""
    pace.seconds = 0.02
    page.fill("#max_tokens", "1500")
    page.fill("#other", '{"ignore_eos": true}')
    page.keyboard.press("Control+Enter")


def words(pane: Any) -> str:
    """The text of a pane, without the tokens of a stop string or end of sequence."""
    return "".join(pane.locator(".t:not(.cut)").all_text_contents())


@pytest.mark.slow
def test_streamed_tokens_match_generate(site: Served, open_page: Opens, pace: Pace) -> None:
    service = site.service
    page = open_ready(open_page, site.url)
    page.fill("#prompt", "Once upon a time")
    page.fill("#seed", "7")
    page.fill("#max_tokens", "80")
    pace.seconds = 0.02
    page.click("#go")
    comes_true(page, "going?.tokens.length > 3 && going.pane.matches('.going') && !going.result")
    pace.seconds = 0.0
    pane = ended(page)
    params = service.llm.default_params().replace(max_tokens=80, seed=7, logprobs=6)
    (result,) = service.llm.generate("Once upon a time", params)
    assert words(pane) == result.outputs[0].text
    assert page.evaluate("right.tokens.map(t => t.id)") == result.outputs[0].token_ids
    assert page.evaluate("right.tokens.map(t => t.logprob)") == result.outputs[0].logprobs
    facts = pane.locator("dl").inner_text()
    assert "length" in facts and re.search(r"Seed\s+7\b", facts)
    levels = page.evaluate("right.tokens.map(t => [Math.exp(t.logprob), t.node.className])")
    assert all(("p0" in names.split()) == (p > 0.9) for p, names in levels)
    assert all(("p4" in names.split()) == (p <= 0.05) for p, names in levels)
    comes_true(page, "document.getElementById('say').textContent.includes('80 tokens')")


@pytest.mark.slow
def test_alternatives_show_on_hover_keyboard_and_tap(site: Served, open_page: Opens) -> None:
    page = open_ready(open_page, site.url)
    pane = run(page, prompt="Once upon a time", seed=7, max_tokens=30, logprobs=5)
    token = pane.locator(".t").nth(3)
    token.hover()
    look = page.locator("#look")
    look.wait_for(state="visible")
    top = page.evaluate("right.tokens[3].top")
    assert look.locator("li").count() >= len(top) == 5
    drawn = look.locator("li.drawn").inner_text().replace("·", " ")
    assert drawn.startswith(f"✓ {token.inner_text()}")
    shares = page.evaluate("right.tokens[3].top.map(([id, p]) => percent(p))")
    assert look.locator(".share").all_inner_texts()[:5] == shares
    page.mouse.move(5, 5)
    look.wait_for(state="hidden")

    pane.locator(".words").focus()
    page.keyboard.press("Home")
    page.keyboard.press("ArrowRight")
    assert look.is_visible()
    at = pane.locator(".words").get_attribute("aria-activedescendant")
    assert at == page.evaluate("right.tokens[1].node.id")
    assert "Likeliest" in str(page.locator(f"#{at}").get_attribute("aria-label"))
    page.keyboard.press("Enter")
    assert page.evaluate("document.getElementById('look').contains(document.activeElement)")
    page.keyboard.press("Escape")
    assert look.is_hidden()
    assert page.evaluate("document.activeElement === right.words")

    phone = open_ready(open_page, site.url, viewport={"width": 360, "height": 740}, has_touch=True)
    pane = run(phone, prompt="Once upon a time", seed=7, max_tokens=30)
    pane.locator(".t").nth(5).tap()
    assert phone.locator("#look").is_visible()
    box = phone.locator("#look").bounding_box()
    assert box["x"] >= 0 and box["x"] + box["width"] <= 360


@pytest.mark.slow
def test_replay_has_same_tokens_and_other_seed_marks_first_difference(
    site: Served, open_page: Opens
) -> None:
    page = open_ready(open_page, site.url)
    first = run(page, prompt="Once upon a time", max_tokens=60)
    text, seed = words(first), page.evaluate("right.seed")
    first.get_by_role("button", name="Replay").click()
    second = ended(page)
    assert page.locator("#panes > .run").count() == 2
    assert words(second) == text and page.evaluate("right.seed") == seed
    verdict = page.locator("#verdict").inner_text()
    assert "the same 60 tokens" in verdict and "byte for byte" in verdict
    assert "every log-prob equal" in verdict
    assert page.locator(".differs").count() == 0

    run(page, seed=(int(seed) + 1))
    ids = page.evaluate("[left, right].map(r => r.tokens.map(t => t.id))")
    place = next(i for i, (a, b) in enumerate(zip(*ids, strict=True)) if a != b)
    assert f"the first difference is token {place + 1}:" in page.locator("#verdict").inner_text()
    marked = "[left, right].map(r => r.tokens.findIndex(t => t.node.classList.contains('differs')))"
    assert page.evaluate(marked) == [place, place]
    page.locator("#panes > .run").first.get_by_role("button", name="Take away").click()
    assert page.locator("#panes > .run").count() == 1 and page.locator("#verdict").is_hidden()


@pytest.mark.slow
def test_run_continues_from_chosen_alternative_token(site: Served, open_page: Opens) -> None:
    page = open_ready(open_page, site.url)
    pane = run(page, prompt="Once upon a time", seed=7, max_tokens=30)
    pane.locator(".t").nth(4).hover()
    page.locator("#look li:not(.drawn) button").first.click()
    ended(page)
    ids = page.evaluate("[left, right].map(r => r.tokens.map(t => t.id))")
    assert ids[0][:4] == ids[1][:4] and ids[0][4] != ids[1][4]
    assert len(ids[1]) <= 30 and page.locator(".t.given").count() == 5
    prompt = page.evaluate("right.asked.promptIds")
    assert page.evaluate("right.result.prompt_token_ids") == prompt + ids[1][:5]


@pytest.mark.slow
@pytest.mark.parametrize("how", ["button", "key"])
def test_stop_aborts_request_on_server(
    how: str, site: Served, open_page: Opens, pace: Pace
) -> None:
    service = site.service
    page = open_ready(open_page, site.url)
    start_long(page, pace)
    comes_true(page, "going?.tokens.length > 3")
    assert service.num_in_progress == 1 and page.inner_text("#go-word") == "Stop"
    if how == "key":
        page.keyboard.press("Escape")
    else:
        page.click("#go")
    pane = ended(page)
    pace.seconds = 0.0
    until(lambda: service.num_in_progress == 0)
    assert "stopped by you" in pane.locator("dl").inner_text()
    assert pane.locator(".t").count() < 1000
    stats = service.llm.stats()
    assert stats["running"] == stats["blocks_used"] == 0


@pytest.mark.slow
def test_model_output_is_shown_as_text_not_html(site: Served, open_page: Opens) -> None:
    page = open_ready(open_page, site.url)
    hostile = '<img src=x onerror="alert(1)"><script>alert(2)</script>&lt;'
    pane = run(page, other=json.dumps({"choice": [hostile]}), logprobs=3)
    assert words(pane) == hostile
    assert pane.locator("img, script").count() == 0
    pane.locator(".t").first.hover()
    assert page.locator("#look img, #look script").count() == 0
    split = "a 🦊 and naïve 你好"  # characters that take several tokens each
    pane = run(page, other=json.dumps({"choice": [split]}))
    assert words(pane) == split
    pane = run(page, other=json.dumps({"choice": ["one two three"]}), stop=" two")
    assert words(pane) == "one" and "stop: “·two”" in pane.locator("dl").inner_text()
    assert pane.locator(".t.cut").count() >= 1


@pytest.mark.slow
def test_accepted_draft_tokens_are_marked_and_counted(site: Served, open_page: Opens) -> None:
    page = open_ready(open_page, site.url)
    again = json.dumps({"choice": ["one fox two fox one fox two fox one fox two fox one fox two"]})
    run(page, prompt="one fox two fox one fox two fox", other=again, temperature=0)
    draft = page.evaluate("right.result.metrics.draft")
    marked = page.locator(".run .t.accepted").count()
    assert marked == sum(draft["num_accepted"]) > 0
    assert page.locator("#legend-drafted").is_visible()
    page.uncheck("#draft")
    run(page)
    assert page.locator(".run .t.accepted").count() == 0


@pytest.mark.slow
def test_chat_continues_with_earlier_turns(site: Served, open_page: Opens) -> None:
    service = site.service
    page = open_ready(open_page, site.url)
    page.check("#mode-chat")
    page.locator("#messages textarea").first.fill("Tell me a story about a fox.")
    pane = run(page, seed=3, max_tokens=40)
    messages = [{"role": "user", "content": "Tell me a story about a fox."}]
    assert page.evaluate("right.asked.promptIds") == service.llm._chat_ids(messages)
    params = service.llm.default_params().replace(max_tokens=40, seed=3)
    result = service.llm.chat(messages, params)
    assert words(pane) == result.outputs[0].text
    pane.get_by_role("button", name="Add to the chat").click()
    page.locator("#messages textarea").last.fill("And then?")
    run(page)
    messages += [
        {"role": "assistant", "content": result.outputs[0].text},
        {"role": "user", "content": "And then?"},
    ]
    assert page.evaluate("right.asked.promptIds") == service.llm._chat_ids(messages)


@pytest.mark.slow
def test_server_error_messages_are_shown(site: Served, open_page: Opens) -> None:
    page = open_ready(open_page, site.url, expect="400 (Bad Request)")
    pane = run(page, temperature=-1)
    assert "temperature=-1" in pane.locator(".wrong").inner_text()
    assert "error" in pane.locator("dl").inner_text()
    pane = run(page, temperature=1, other='{"temprature": 2}')
    assert "temprature" in pane.locator(".wrong").inner_text()
    page.fill("#other", "{")
    page.click("#go")
    assert "Other fields" in page.locator("#problem").inner_text()
    page.fill("#other", "")
    page.fill("#prompt", "")
    page.click("#go")
    wrong = "document.querySelector('#panes > .run .wrong')"
    comes_true(page, f"{wrong}?.textContent.includes('prompt')")


@pytest.mark.slow
def test_api_key_is_prompted_for_and_kept_in_session_storage(
    plain: Served, open_page: Opens
) -> None:
    with serving(plain.llm, ServeSettings(api_keys=("correct-horse",))) as locked:
        page = open_page(locked.url, expect="401 (Unauthorized)")
        page.wait_for_selector("#key-dialog[open]")
        assert "no API key" in page.locator("#key-problem").inner_text()
        page.fill("#key", "wrong-battery")
        page.keyboard.press("Enter")
        problem = "document.getElementById('key-problem').textContent"
        comes_true(page, f"{problem}.includes('not one of')")
        page.fill("#key", "correct-horse")
        page.keyboard.press("Enter")
        page.wait_for_selector("#places li")
        run(page, max_tokens=8)
        assert page.evaluate("right.tokens.length") == 8
        assert page.evaluate("Object.values(sessionStorage)") == ["correct-horse"]
        assert page.evaluate("localStorage.length + document.cookie.length") == 0


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [360, 768, 1280])
def test_page_has_contrast_and_no_overflow_at_any_width(
    scheme: str, width: int, site: Served, open_page: Opens
) -> None:
    page = open_ready(
        open_page, site.url, viewport={"width": width, "height": 740}, color_scheme=scheme
    )
    pane = run(page, prompt="Once upon a time", seed=7, max_tokens=60)
    pane.get_by_role("button", name="Replay").click()
    ended(page)
    page.check("#tell")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    contrast = page.evaluate(CONTRASTS)
    assert len(contrast) > 20
    assert {name: ratio for name, ratio in contrast if ratio < 4.5} == {}


@pytest.mark.slow
def test_gauges_follow_the_engine(site: Served, open_page: Opens, pace: Pace) -> None:
    page = open_ready(open_page, site.url)
    assert page.inner_text("#running") == "0"
    start_long(page, pace)
    comes_true(page, "document.getElementById('running').textContent === '1'")
    comes_true(page, "Number(document.getElementById('rate').textContent) > 1")
    assert not page.inner_text("#kv-blocks").startswith("0 of")
    page.keyboard.press("Escape")
    ended(page)
    pace.seconds = 0.0
    comes_true(page, "document.getElementById('running').textContent === '0'")


# The contrast ratio of every text with its background, by WCAG 2.
CONTRASTS = """() => {
  const parts = (c) => c.match(/[\\d.]+/g).map(Number);
  const light = (c) => parts(c).slice(0, 3).map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((parts(color)[3] ?? 1) === 1) return color;
    }
    return getComputedStyle(document.body).backgroundColor;
  };
  const texts = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  const found = [];
  while (texts.nextNode()) {
    const node = texts.currentNode.parentElement;
    const text = texts.currentNode.data.trim();
    if (!text || !node.checkVisibility() || node.closest("script, dialog, .unseen")) continue;
    const [a, b] = [light(getComputedStyle(node).color), light(behind(node))].sort((x, y) => y - x);
    found.push([`${node.tagName}.${node.className} ${text.slice(0, 20)}`, (a + 0.05) / (b + 0.05)]);
  }
  return found;
}"""
