"""The page in Chromium: what a reader points at, presses, and reads."""

import http.server
import re
import shutil
import threading
import time

import numpy as np
import pytest
from made_up_seen import make_seen

from transformer_tf.attention_page import attention_page
from transformer_tf.tables import NORMS, WORDS, OneHead, explain_token, vector

NEEDS = "needs chromium and chromium-driver, and pip install -e '.[browser]'"
webdriver = pytest.importorskip("selenium.webdriver", reason=NEEDS)
from selenium.webdriver.common.action_chains import ActionChains  # noqa: E402
from selenium.webdriver.common.actions.action_builder import (  # noqa: E402
    ActionBuilder,
)
from selenium.webdriver.common.actions.pointer_input import PointerInput  # noqa: E402
from selenium.webdriver.common.keys import Keys  # noqa: E402

SOURCE, TARGET = ["▁明日", "は", "天気", "</s>"], ["▁To", "mor", "row", "▁.", "</s>"]
SEEN = make_seen(SOURCE, TARGET)
SIDES = ["encoder", "decoder", "cross"]
HOSTILE = [
    "<script>alert(1)</script>",
    "</script>",
    "\"'&amp;<img/src=x>",
    "\u202eevil",
    "\u0301",
    "e" + "\u0301" * 60,
    "\u2028",
    "x" * 300,
]
CHROMES = ("chromium", "chromium-browser", "google-chrome", "chrome")


@pytest.fixture(scope="module")
def browser():
    chrome = next(filter(None, map(shutil.which, CHROMES)), None)
    driver = shutil.which("chromedriver")
    if not (chrome and driver):
        pytest.skip(NEEDS)
    options = webdriver.ChromeOptions()
    options.binary_location = chrome
    for flag in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage"):
        options.add_argument(flag)
    options.set_capability(
        "goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"}
    )
    service = webdriver.ChromeService(driver)
    with webdriver.Chrome(options=options, service=service) as browser:
        yield browser


class Page:
    """A page as its reader has it."""

    def __init__(self, browser, path):
        self.browser = browser
        self.path = path

    def open(self, seen, text="明日は天気", translation="Tomorrow.", lang="en"):
        html = attention_page(seen, text, translation, lang)
        self.path.write_text(html, "utf-8")
        self.browser.get_log("performance")  # forgets what was before
        self.browser.get(self.path.as_uri())
        self.settle()
        return self

    def look(self, width, dark=False):
        """Of a phone or a desk, by day or by night; before the page is opened."""
        phone = width < 600
        feature = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.cdp("Emulation.setEmulatedMedia", features=[feature])
        self.cdp("Emulation.setTouchEmulationEnabled", enabled=phone)
        sizes = dict(width=width, height=800, deviceScaleFactor=1, mobile=phone)
        self.cdp("Emulation.setDeviceMetricsOverride", **sizes)
        return self

    def cdp(self, command, **options):
        return self.browser.execute_cdp_cmd(command, options)

    def all(self, selector):
        return self.browser.find_elements("css selector", selector)

    def one(self, selector):
        return self.browser.find_element("css selector", selector)

    def js(self, code, *arguments):
        return self.browser.execute_script(f"return {code}", *arguments)

    def texts(self, selector):
        code = "[...document.querySelectorAll(arguments[0])].map(x => x.textContent)"
        return self.js(code, selector)

    def rows(self, selector):
        """The rows of a table as lists of the cells' texts."""
        code = (
            "[...document.querySelectorAll(arguments[0])].map("
            "row => [...row.cells].map(cell => cell.textContent))"
        )
        return self.js(code, selector + " tr")

    def choose(self, name, value):
        self.one(f'label:has([name={name}][value="{value}"])').click()
        self.settle()

    def settle(self, seconds=5):
        """Numbers are unpacked beside."""
        end = time.monotonic() + seconds
        while not self.all("#map[aria-busy=false]"):
            assert time.monotonic() < end

    def token(self, i):
        return self.all("#queries button")[i]

    def hover(self, element):
        ActionChains(self.browser).move_to_element(element).perform()

    def press(self, *keys):
        ActionChains(self.browser).send_keys(*keys).perform()

    def tap(self, element):
        finger = ActionBuilder(self.browser, mouse=PointerInput("touch", "finger"))
        finger.pointer_action.move_to(element).pointer_down().pointer_up()
        finger.perform()

    def chosen(self):
        return self.texts("#queries [aria-current=true]")

    def opened(self):
        return self.texts("#queries [aria-expanded=true]")


@pytest.fixture
def page(browser, tmp_path):
    page = Page(browser, tmp_path / "page.html").look(1440)
    browser.get_log("browser")
    yield page
    assert browser.get_log("browser") == []


def percents(side, layer, head, token):
    shares = np.asarray(SEEN.looks[side][layer].steps.shares)[0, head, token]
    return [f"{100 * share:.1f} %" for share in shares]


def test_side_layer_and_head_are_chosen_and_tokens_pointed_at(page):
    page.open(SEEN)
    assert page.texts("#text, #translation") == ["明日は天気", "Tomorrow."]
    for number, side in enumerate(SIDES):
        page.choose("side", number)
        queries, keys = SEEN.names(side)
        assert page.texts("#queries bdi") == queries
        assert page.texts("#keys bdi") == keys
        page.hover(page.token(1))
        assert page.chosen() == [queries[1]]
        for layer, head in [(0, 0), (1, 0), (1, 1)]:
            page.choose("layer", layer)
            page.choose("head", head)
            assert page.texts("#keys .percent") == percents(side, layer, head, 1)
        hidden = len(page.all("#keys .hidden"))
        assert hidden == (len(keys) - 2 if side == "decoder" else 0)
    assert page.opened() == []


def test_numbers_that_come_late_do_not_overtake(page):
    page.open(SEEN)
    page.browser.execute_script(
        "const quick = unpack; let waits = 300;"
        "unpack = async (text) => {"
        "  const wait = waits; waits = 0;"
        "  await new Promise((go) => setTimeout(go, wait));"
        "  return quick(text); };"
        "for (const side of [1, 2])"
        "  document.querySelector(`[name=side][value='${side}']`).click();"
    )
    time.sleep(0.5)
    assert page.texts("#queries bdi") == SEEN.names("cross")[0]
    assert page.texts("#keys .percent") == percents("cross", 0, 0, 0)


def test_lines_go_to_what_the_chosen_token_sees(page):
    page.open(SEEN)
    page.hover(page.token(2))
    shares = np.asarray(SEEN.looks["encoder"][0].steps.shares)[0, 0]
    strong = page.js(
        "[...document.querySelectorAll('#lines .strong')].map("
        "x => [x.getAttribute('d'), x.style.getPropertyValue('--share')])"
    )
    assert strong == [
        [f"M0 2.5C45 2.5 55 {key + 0.5} 100 {key + 0.5}", f"{share:.3f}".rstrip("0")]
        for key, share in enumerate(shares[2])
        if share >= 0.005
    ]
    assert len(page.all("#lines path")) == len(strong) + len(SOURCE)


@pytest.mark.parametrize("lang", ["ja", "en"])
@pytest.mark.parametrize("side", SIDES)
def test_the_four_steps_are_those_of_the_command_line(page, side, lang):
    page.open(SEEN, lang=lang)
    page.choose("side", SIDES.index(side))
    page.choose("layer", 1)
    page.choose("head", 1)
    queries, keys = SEEN.names(side)
    page.token(2).click()
    assert page.opened() == [queries[2]]
    look = SEEN.looks[side][1]
    head = OneHead.of(look, 1, masked=side == "decoder")
    said = explain_token(head, 2, queries, keys, lang=lang, dims=4)
    title, vectors, steps, mixed = said.split("\n\n")
    assert page.texts("#steps-title") == [title]
    shown = page.rows("table.vectors")
    assert joined(
        [
            ["", shown[0][1], *shown[2][1:]],
            [shown[3][0], shown[1][1], *shown[3][1:]],
            *shown[4:],
        ]
    ) == joined(split(vectors))
    assert shown[1][0] == queries[2]
    assert joined(page.rows("table.shares")) == joined(split(steps))
    result = page.texts(".step:has(.mixed) h3") + joined(page.rows("table.mixed"))
    assert result == [" ".join(line.split()) for line in mixed.splitlines()]
    added = {"x": look.x, "attn_output": look.attn_output, "out": look.out}
    assert page.rows("table.added") == [
        [name, vector(rows[0, 2], 4)] for name, rows in added.items()
    ]
    expected = WORDS[lang]["added"].format(norm=NORMS[side])
    assert page.texts(".step:has(.added) h3") == [expected]


def split(table):
    return [re.split(r"\s{2,}", line) for line in table.splitlines()]


def joined(rows):
    """Without the empty cells, which a terminal shows as more space."""
    return [" ".join(" ".join(filter(None, row)).split()) for row in rows]


def test_the_keyboard_is_enough(page):
    page.open(SEEN)
    page.js("document.querySelector('[name=head]:checked').focus()")
    page.press(Keys.ARROW_RIGHT)
    page.settle()
    assert page.texts("#keys .percent") == percents("encoder", 0, 1, 0)
    page.press(Keys.TAB)
    assert page.js("document.activeElement.textContent") == SOURCE[0]
    page.press(Keys.ARROW_DOWN, Keys.ARROW_DOWN)
    assert page.chosen() == [SOURCE[2]]
    assert page.texts("#keys .percent") == percents("encoder", 0, 1, 2)
    outline = "getComputedStyle(document.activeElement).outlineStyle"
    assert page.js(outline) == "solid"
    page.press(Keys.ENTER)
    assert page.opened() == [SOURCE[2]]
    page.press(Keys.HOME)
    assert (page.chosen(), page.opened()) == ([SOURCE[0]], [SOURCE[2]])
    page.press(Keys.END, Keys.SPACE)
    assert page.opened() == [SOURCE[-1]]
    page.press(Keys.ESCAPE)
    assert page.opened() == []
    assert page.js("document.activeElement.textContent") == SOURCE[-1]
    assert page.texts("#opened table") == []


def test_what_is_opened_stays_while_another_token_is_pointed_at(page):
    page.open(SEEN)
    page.token(1).click()
    page.hover(page.token(3))
    assert (page.chosen(), page.opened()) == ([SOURCE[3]], [SOURCE[1]])
    page.hover(page.one("h1"))
    assert page.chosen() == [SOURCE[1]]


def test_a_finger_sees_the_shares_before_it_opens(page):
    page.look(390).open(SEEN)
    page.tap(page.token(2))
    assert page.chosen() == [SOURCE[2]]
    assert page.opened() == []
    page.tap(page.token(2))
    assert page.opened() == [SOURCE[2]]
    page.one("#close").click()
    page.one("#open").click()
    assert page.opened() == [SOURCE[2]]


def test_the_language_is_switched(page):
    page.open(SEEN, lang="ja")
    page.token(1).click()
    assert page.texts("#steps-title") == ["「は」が見る（8 個の数、√8 = 2.828）"]
    page.one("#languages [lang=en]").click()
    assert page.texts("#steps-title") == ['"は" looks (8 numbers, √8 = 2.828)']
    assert page.js("document.documentElement.lang") == "en"
    assert page.texts("#languages [aria-pressed=true]") == ["English"]
    said = "".join(page.texts("legend, h1, h2, h3, p, th, small, button.main"))
    assert not re.search("[ぁ-ん]", said.replace("は", ""))


def test_everything_has_a_name(page):
    page.open(SEEN)
    page.token(1).click()
    tree = page.cdp("Accessibility.getFullAXTree")["nodes"]
    named = [
        (node["role"]["value"], node["name"]["value"])
        for node in tree
        if node.get("role") and node.get("name") and not node["ignored"]
    ]
    for role in ("button", "radio", "group", "list", "region", "heading"):
        names = [name for found, name in named if found == role]
        assert names, role
        assert all(names), role
    assert ("button", SOURCE[1]) in named
    assert ("radio", "encoder source looks at source") in named


# --- Whatever the text, whatever the window -----------------------------------------


def test_a_hostile_sentence_is_only_text(page):
    text = " ".join(HOSTILE)
    page.open(make_seen(HOSTILE, HOSTILE), text=text, translation=text)
    page.token(3).click()
    assert page.texts("#queries bdi") == HOSTILE
    assert page.texts("#text, #translation") == [text, text]
    assert page.texts("table.mixed bdi") == HOSTILE
    assert page.js("document.scripts.length") == 2
    assert page.all("img, b[onclick]") == []
    isolated = "[...document.querySelectorAll('bdi')].every(x => "
    isolated += "getComputedStyle(x).unicodeBidi === 'isolate')"
    assert page.js(isolated)
    assert page.texts("#keys .percent")[0].endswith("%")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1440])
@pytest.mark.parametrize("tokens", [(SOURCE, TARGET), (HOSTILE, HOSTILE)])
def test_it_fits_the_window(page, width, dark, tokens):
    text = " ".join(tokens[0])
    page.look(width, dark).open(make_seen(*tokens), text=text)
    page.choose("side", 1)
    page.js("document.querySelectorAll('#queries button')[2].click()")
    assert page.js("document.documentElement.scrollWidth") <= width
    body = page.one("body")
    assert page.js("innerWidth") == width
    colours = [body.value_of_css_property(name) for name in ("color", "background")]
    ink, paper = (sum(map(int, re.findall(r"\d+", c)[:3])) for c in colours)
    assert (ink > paper) == dark
    assert abs(ink - paper) > 400


def test_nothing_leaves_the_page(page, browser):
    asked = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        def log_message(self, *_):
            pass

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        page.open(SEEN)
        page.token(1).click()
        page.choose("side", 2)
        sent = [
            entry["message"]
            for entry in browser.get_log("performance")
            if '"Network.requestWillBeSent"' in entry["message"]
        ]
        assert len(sent) == 1  # the page itself
        assert page.js("performance.getEntriesByType('resource').length") == 0
        assert browser.get_log("browser") == []
        blocked = browser.execute_async_script(
            "const [url, done] = arguments;"
            "const image = new Image(); image.src = url + 'image';"
            "const script = document.createElement('script');"
            "script.textContent = 'window.ran = true'; document.body.append(script);"
            "fetch(url).then(() => done('sent'), () => done('blocked'))",
            f"http://127.0.0.1:{server.server_port}/",
        )
        assert (blocked, page.js("window.ran"), asked) == ("blocked", None, [])
        assert browser.get_log("browser") != []  # which says what was refused
    finally:
        server.shutdown()
        server.server_close()


def test_the_longest_sentence_is_usable(page):
    tokens = [f"▁{i}" for i in range(256)]
    page.open(make_seen(tokens, tokens, layers=1, heads=1), text="長い" * 500)
    assert page.js("document.querySelectorAll('*').length") < 4000
    start = time.monotonic()
    page.token(0).click()
    page.press(Keys.END)
    assert page.chosen() == [tokens[255]]
    page.press(Keys.ENTER)
    assert len(page.rows("table.shares")) == 257
    assert page.js("scrollY + innerHeight") < 4000  # what is chosen is not far away
    assert time.monotonic() - start < 5
