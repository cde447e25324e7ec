"""The page in a real Chromium: nothing asked of the network, nothing on the console, all figures
drawn, readable on a phone and on a desk, in light and in dark."""

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
from selenium import webdriver

WIDTHS = (360, 1280)
SCHEMES = ("light", "dark")
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)

# Every piece of text with its contrast to what lies under it (WCAG 2.1, relative luminance).
_CONTRASTS = """
const luminance = ([r, g, b]) => {
  const [x, y, z] = [r, g, b].map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  return 0.2126 * x + 0.7152 * y + 0.0722 * z;
};
const parse = text => text.match(/[\\d.]+/g).map(Number);
const under = element => {
  for (let e = element; e; e = e.parentElement) {
    const colour = parse(getComputedStyle(e).backgroundColor);
    if (colour.length < 4 || colour[3] > 0) return colour;
  }
  return [255, 255, 255];
};
const found = [];
const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
while (walker.nextNode()) {
  const element = walker.currentNode.parentElement;
  if (!walker.currentNode.data.trim() || element.closest('title, style')) continue;
  const style = getComputedStyle(element);
  const ink = parse(element.closest('svg') ? style.fill : style.color);
  const [a, b] = [luminance(ink), luminance(under(element))].sort((x, y) => y - x);
  found.push([(a + 0.05) / (b + 0.05), walker.currentNode.data.trim()]);
}
return found;
"""

# For each figure: its size, how many shapes carry data, texts outside it, texts over each other.
_FIGURES = """
return [...document.querySelectorAll('svg.figure')].map(svg => {
  const box = svg.getBoundingClientRect();
  const shapes = [...svg.querySelectorAll('.marker, .line, .bar')].filter(shape => {
    const r = shape.getBoundingClientRect();
    return r.width > 0 || r.height > 0;
  });
  const texts = [...svg.querySelectorAll('text')]
    .map(t => [t.textContent, t.getBoundingClientRect()]);
  const outside = texts.filter(([, r]) => r.left < box.left - 1 || r.right > box.right + 1
    || r.top < box.top - 1 || r.bottom > box.bottom + 1).map(([text]) => text);
  const over = [];
  texts.forEach(([a, r], i) => texts.slice(i + 1).forEach(([b, s]) => {
    if (r.left < s.right - 1 && s.left < r.right - 1 && r.top + 2 < s.bottom - 2
        && s.top + 2 < r.bottom - 2) over.push([a, b]);
  }));
  return {label: svg.getAttribute('aria-label'), width: box.width, height: box.height,
          shapes: shapes.length, outside, over,
          broken: /NaN|Infinity|undefined/.test(svg.outerHTML)};
});
"""


@pytest.fixture(scope="module")
def browser():
    options = webdriver.ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    for flag in _FLAGS:
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = webdriver.Chrome(
        options=options, service=webdriver.ChromeService("/usr/bin/chromedriver")
    )
    yield driver
    driver.quit()


# The pages and how many figures each has.
PAGES = {"run": 9, "compare": 3}
CASES = [(page, w, s) for page in PAGES for w in WIDTHS for s in SCHEMES]


@dataclass(frozen=True)
class Opened:
    """A page in the browser at one width in one colour scheme."""

    browser: webdriver.Chrome
    path: Path
    num_figures: int
    width: int
    scheme: str


@pytest.fixture(params=CASES, ids=lambda p: "-".join(map(str, p)))
def opened(request, browser, tiny_run, compare_page):
    page, width, scheme = request.param
    path = {"run": tiny_run / "report" / "index.html", "compare": compare_page}[page]
    size = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 500}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    feature = {"name": "prefers-color-scheme", "value": scheme}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})
    for kind in ("browser", "performance"):
        browser.get_log(kind)  # of the page before
    browser.get(f"file://{path}")
    return Opened(browser, path, PAGES[page], width, scheme)


def test_nothing_on_the_console_and_nothing_asked_of_the_network(opened):
    browser = opened.browser
    assert browser.get_log("browser") == []
    messages = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [
        m["params"]["request"]["url"]
        for m in messages
        if m["method"] == "Network.requestWillBeSent"
    ]
    page = f"file://{opened.path}"
    assert [url for url in asked if url != page and not url.startswith("data:")] == []
    assert page in asked  # the log does see requests


def test_no_horizontal_scroll(opened):
    browser = opened.browser
    assert browser.execute_script("return document.documentElement.scrollWidth") <= opened.width
    assert browser.execute_script("return innerWidth") == opened.width


def test_every_figure_is_drawn_whole(opened):
    figures = opened.browser.execute_script(_FIGURES)
    assert len(figures) == opened.num_figures
    for figure in figures:
        assert figure["width"] >= 250, figure
        assert figure["height"] >= 100, figure
        assert figure["shapes"] >= 1, figure
        assert figure["outside"] == [], figure
        assert figure["over"] == [], figure
        assert not figure["broken"], figure


def test_all_text_has_contrast(opened):
    found = opened.browser.execute_script(_CONTRASTS)
    assert len(found) > 80
    assert [pair for pair in found if pair[0] < 4.5] == []
    dark = opened.browser.execute_script("return getComputedStyle(document.body).backgroundColor")
    assert (dark == "rgb(20, 23, 26)") == (opened.scheme == "dark")


def test_tables_fit_a_phone(opened):
    """No table needs sideways scrolling inside the page either."""
    script = (
        "return [...document.querySelectorAll('.scroll')]"
        ".filter(e => e.scrollWidth > e.clientWidth + 1).map(e => e.innerText)"
    )
    assert opened.browser.execute_script(script) == []


def test_print_shows_all_options(browser, tiny_run):
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    browser.get(f"file://{tiny_run / 'report' / 'index.html'}")
    heights = browser.execute_script(
        "return [...document.querySelectorAll('details pre')].map(e => e.offsetHeight)"
    )
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    assert len(heights) == 7
    assert min(heights) > 10
