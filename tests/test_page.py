"""The page of an audit or a profile: whole in itself, true to the numbers, deaf to markup in names, and alive in Chromium."""

import json
import re
import shutil
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

import gradflow
from gradflow import laws, page, verdicts
from gradflow.auditing import audits
from gradflow.checkpoints.parity import FIXTURES
from gradflow.factors import CURVES, FACTORS
from gradflow.stack import Stack

HOSTILE = "</script><img src=x onerror=alert(1)> {{data}} \"'&<!--"
TEXTS = ("The gradient flows through a deep stack", "A stack flows")
VOID = {"meta", "br", "img", "input", "link", "wbr"}


class Reader(HTMLParser):
    """Tags in order, and the text of each element with an id, of each script, and of each table row."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.open, self.text, self.rows = [], [], {}, []
        self.feed(text)
        assert not self.open, f"left open: {self.open}"

    def handle_starttag(self, tag, attrs):
        attrs = dict(attrs)
        self.tags.append((tag, attrs))
        if tag == "tr":
            self.rows.append([])
        if tag not in VOID:
            self.open.append((tag, attrs.get("id") or tag))
        if tag in ("td", "th"):
            self.rows[-1].append([attrs.get("data-value"), ""])

    def handle_endtag(self, tag):
        assert self.open.pop()[0] == tag

    def handle_data(self, data):
        for _, name in self.open:
            self.text[name] = self.text.get(name, "") + data
        if self.open and self.open[-1][0] in ("td", "th"):
            self.rows[-1][-1][1] += data

    @property
    def data(self):
        return json.loads(self.text["data"])


@pytest.fixture(scope="module")
def audit():
    return gradflow.audit(FIXTURES / "bert", TEXTS)


@pytest.fixture(scope="module")
def lawful():
    """A measured profile, and its law."""
    stack = Stack.make("post-ln", ["linear"], 4, 8, norm="rms")
    return gradflow.profile(stack, np.ones((1, 8)), seeds=3), laws.law("post-ln", stack.block, 4, d=8, norm="rms")


def relabelled(a, name):
    p = replace(a.profile, labels=(f"1 {name}", *a.profile.labels[1:]))
    return replace(a, profile=p, settings=dict(a.settings) | {"model": name, "text": [name, *TEXTS[1:]]})


# ---- whole in itself ----


def test_the_page_asks_for_nothing(audit):
    text = page.page(audit, "gradflow audit model")
    tags = Reader(text).tags
    assert not {"link", "img", "iframe", "object", "embed", "base"} & {tag for tag, _ in tags}
    assert not {"src", "href", "srcset", "action", "data", "style"} & {name for _, attrs in tags for name in attrs}
    assert not [name for _, attrs in tags for name in attrs if name.startswith("on")]
    assert "://" not in text
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|import\(|innerHTML", text)
    policy = next(attrs["content"] for _, attrs in tags if attrs.get("http-equiv") == "Content-Security-Policy")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert text == page.page(audit, "gradflow audit model")  # the same bytes
    assert "{{" not in text


def test_what_is_drawn_is_the_profile(audit, lawful):
    p, law = lawful
    for result, profile, beside in ((audit, audit.profile, None), (p, p, law)):
        found = Reader(page.page(result, law=beside)).data
        assert found["labels"] == list(profile.labels)
        factors, gains = ({s["name"]: s for s in found["charts"][name]} for name in ("factors", "gains"))
        for name in (*FACTORS, "net"):
            np.testing.assert_array_equal(factors[name]["logs"], np.log(profile.summary(name).mean))
        np.testing.assert_allclose(
            factors["net"]["logs"], sum(np.array(factors[f]["logs"]) for f in FACTORS), atol=1e-12
        )
        for name in CURVES:
            logs = getattr(profile, f"log_{name}")
            np.testing.assert_allclose(np.exp(gains[name]["logs"]), np.exp(np.mean(logs, 0)), rtol=1e-14)
            low, high = np.array(gains[name]["band"])
            assert ((logs.min(0) <= low) & (low <= high) & (high <= logs.max(0))).all()
        assert ("exact, law" in gains) == (beside is not None)
        looks = {(s["colour"], s["marker"]) for s in found["charts"]["factors"]}
        assert len(looks) == len({marker for _, marker in looks}) == 6  # told apart without colour
    np.testing.assert_array_equal(gains["exact, law"]["logs"], law.log_exact[0])
    np.testing.assert_array_equal(gains["trunk, law"]["logs"], law.log_trunk[0])


def test_without_a_script_the_tables_say_it(audit):
    reader, p = Reader(page.page(audit, "gradflow audit 'my model'")), audit.profile
    assert reader.text["verdict"] == audit.verdict
    assert "gradflow audit 'my model'" in reader.text["command"]
    assert TEXTS[0] in reader.text["settings"]
    assert audit.parity.tested in reader.text["settings"]
    gains = {row[0][1]: row for row in reader.rows[1:6]}
    assert float(gains["exact"][1][0]) == pytest.approx(np.exp(p.log_exact[:, 0].mean()), rel=1e-14)
    estimate = gains["estimate (1 − 0.2)^L"]
    assert float(estimate[1][0]) == pytest.approx(0.8**6, rel=1e-14)
    assert float(estimate[2][0]) == pytest.approx(0.8, rel=1e-14)
    head, *rows = reader.rows[6 : 7 + len(p.labels)]
    column = [name for _, name in head].index
    assert [row[0][1] for row in rows] == list(p.labels)
    for name in ("affine", "projection", "norm", "branch", "net", "exact", "trunk", "local", "bound"):
        assert [float(row[column(name)][0]) for row in rows] == p.summary(name).mean[:6].tolist(), name
    assert "skip" not in [name for _, name in head]  # 1 everywhere


def test_names_stay_text(audit):
    text = page.page(relabelled(audit, HOSTILE), f"gradflow audit {HOSTILE}")
    reader = Reader(text)
    assert "img" not in [tag for tag, _ in reader.tags]
    assert [tag for tag, _ in reader.tags].count("script") == 2
    assert reader.data["labels"][0] == f"1 {HOSTILE}"
    assert reader.text["title"] == f"gradflow audit: {HOSTILE}"
    assert HOSTILE in reader.text["settings"]
    assert HOSTILE in reader.text["command"]
    assert f"1 {HOSTILE}" in [row[0][1] for row in reader.rows]
    assert "<" not in reader.text["data"].replace(HOSTILE, "")


def test_what_is_no_number_is_null_and_a_dash(lawful):
    p, _ = lawful
    zero = replace(p, net=np.zeros_like(p.net), log_local=np.full_like(p.log_local, np.nan), branch=p.branch * np.nan)
    reader = Reader(page.page(zero))
    factors, gains = ({s["name"]: s for s in reader.data["charts"][name]} for name in ("factors", "gains"))
    assert factors["net"]["logs"] == [None] * 4
    assert gains["local"]["logs"] == [None] * 5
    assert not gains["local"]["shown"]
    assert "–" in [cell for row in reader.rows for _, cell in row]


# ---- verdict, law and shell ----


def test_a_profile_is_judged_beside_its_law(lawful):
    p, law = lawful
    said = verdicts.profile(p, law)
    worst = p.labels[int(np.argmin(np.log(p.net).mean(0)))]
    for figure in (p.log_exact[:, 0].mean(), law.log_exact[0, 0], p.log_trunk[:, 0].mean()):
        assert f"{np.exp(figure):.4g}" in said
    assert f"{worst} keeps least, {np.exp(np.log(p.net).mean(0).min()):.4g}" in said
    with pytest.raises(ValueError, match="law: has 5 rows and the profile 4"):
        page.page(p, law=laws.law("post-ln", ["linear"], 5))


def test_the_shell_writes_it_whole(shell, monkeypatch, tmp_path, audit):
    monkeypatch.setattr(audits, "audit", lambda *a, **b: audit)
    file = tmp_path / "a page.html"
    file.write_text("older")
    code, out, err = shell("audit", "a model", "--text", TEXTS[0], "--html", file)
    assert (code, err) == (0, f"Page written to {file}\n")
    assert out.rstrip() == str(audit)
    said = Reader(file.read_text(encoding="utf-8"))
    assert said.text["command"] == f"Commandgradflow audit 'a model' --text '{TEXTS[0]}' --html '{file}'"
    assert list(tmp_path.iterdir()) == [file]  # nothing half-written beside it
    code, out, err = shell("audit", "a model", "--text", TEXTS[0], "--html", file, "--json")
    assert (code, err) == (0, "")
    assert json.loads(out)["verdict"] == audit.verdict

    monkeypatch.setattr(page, "page", lambda *a: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        page.save(audit, file)
    assert "gradflow audit" in file.read_text(encoding="utf-8")  # the one before
    assert list(tmp_path.iterdir()) == [file]


def test_a_profile_has_a_page_with_its_law(shell, tmp_path):
    file = tmp_path / "p.html"
    sizes = ("--block", "linear", "--depth", "2", "--d", "8", "--tokens", "1", "--norm", "rms", "--seeds", "2")
    code, _, err = shell("profile", "post-ln", *sizes, "--html", file)
    assert (code, err) == (0, f"Page written to {file}\n")
    found = {s["name"]: s["logs"] for s in Reader(file.read_text(encoding="utf-8")).data["charts"]["gains"]}
    np.testing.assert_array_equal(found["exact, law"], laws.law("post-ln", "linear", 2, d=8, norm="rms").log_exact[0])


@pytest.mark.parametrize(("command", "work"), [("audit", "auditing.audits.audit"), ("profile", "profiles.profile")])
@pytest.mark.parametrize(("at", "why"), [("nowhere/p.html", "no such folder"), ("", "is no file")])
def test_it_is_refused_before_any_work(shell, monkeypatch, tmp_path, command, work, at, why):
    monkeypatch.setattr(f"gradflow.{work}", lambda *a, **b: pytest.fail("worked"))
    given = (FIXTURES / "bert", "--text", TEXTS[0]) if command == "audit" else ("post-ln",)
    code, out, err = shell(command, *given, "--html", tmp_path / at)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith("gradflow: html: ")
    assert why in err


# ---- in a browser ----


@pytest.fixture(scope="module")
def chromium():
    sync = pytest.importorskip("playwright.sync_api")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("no Chromium")
    with sync.sync_playwright() as play:
        browser = play.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def opened(chromium, tmp_path, audit):
    """Open a page, with every message, error, dialog and further request that it met."""
    contexts = []

    def at(text, width=1200, **options):
        file = Path(tmp_path / "page.html")
        file.write_text(text, encoding="utf-8")
        contexts.append(chromium.new_context(viewport={"width": width, "height": 800}, **options))
        tab, met = contexts[-1].new_page(), []
        tab.on("console", lambda message: met.append(message.text))
        tab.on("pageerror", lambda error: met.append(str(error)))
        tab.on("dialog", lambda dialog: (met.append("dialog"), dialog.dismiss()))
        tab.on("request", lambda request: met.append(request.url))
        tab.goto(file.as_uri())
        return tab, [what for what in met if what != file.as_uri()]

    yield at
    for context in contexts:
        context.close()


def test_chromium_reads_out_the_sublayer_under_the_pointer(opened, audit):
    tab, met = opened(page.page(audit))
    plot, tip = tab.locator("#factors svg.plot"), tab.locator("#factors .tip")
    assert not met
    assert tab.locator("#factors .legend button").all_inner_texts() == [*FACTORS, "net"]
    assert not tip.is_visible()
    box = plot.bounding_box()
    tab.mouse.move(box["x"] + box["width"] - 15, box["y"] + 50)
    p = audit.profile
    said = tip.inner_text().split("\n")
    assert said[0] == p.labels[-1]
    assert f"{p.summary('net').mean[-1]:.4g}" in said
    tab.mouse.move(0, 0)
    assert not tip.is_visible()

    plot.focus()
    for press, label in (("Home", 0), ("ArrowRight", 1), ("ArrowRight", 2), ("ArrowLeft", 1), ("End", -1)):
        tab.keyboard.press(press)
        assert tip.locator("strong").inner_text() == p.labels[label]
        assert plot.get_attribute("aria-valuetext").startswith(f"{p.labels[label]}: affine ")
    tab.keyboard.press("Escape")
    assert not tip.is_visible()

    before = plot.locator("path").count()
    tab.locator("#factors .legend button", has_text="norm").click()
    assert plot.locator("path").count() < before
    tab.locator("#factors .legend button", has_text="norm").click()
    assert plot.locator("path").count() == before


def test_chromium_sorts_by_a_column_also_by_keyboard(opened, audit):
    tab, _ = opened(page.page(audit))
    table = tab.locator("table").nth(1)
    names = lambda: table.locator("tbody th").all_inner_texts()  # noqa: E731
    assert names() == list(audit.profile.labels)
    net = audit.profile.summary("net").mean
    up = [audit.profile.labels[i] for i in np.argsort(net)]
    head = table.locator("thead th", has_text="net")
    head.locator("button").click()
    assert (names(), head.get_attribute("aria-sort")) == (up, "ascending")
    head.locator("button").press("Enter")
    assert (names(), head.get_attribute("aria-sort")) == (up[::-1], "descending")
    assert table.locator("[aria-sort='descending'], [aria-sort='ascending']").count() == 1
    table.locator("thead button").first.press("Space")
    assert names() == list(audit.profile.labels)


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_chromium_fits_a_phone_in_light_and_dark(opened, audit, scheme):
    tab, _ = opened(page.page(audit, "gradflow audit model"), 360, color_scheme=scheme, has_touch=True)
    assert tab.evaluate("document.documentElement.scrollWidth") == 360
    assert tab.evaluate("getComputedStyle(document.body).fontSize") == "16px"
    paper = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (paper == "rgb(255, 255, 255)") == (scheme == "light")
    plot = tab.locator("#gains svg.plot")
    plot.scroll_into_view_if_needed()
    box = plot.bounding_box()
    assert box["width"] > 320
    tab.touchscreen.tap(box["x"] + box["width"] - 16, box["y"] + 60)
    assert tab.locator("#gains .tip strong").inner_text() == "output"
    shot = tab.screenshot()
    assert shot.startswith(b"\x89PNG")


def test_chromium_runs_no_script_of_a_name(opened, audit):
    tab, met = opened(page.page(relabelled(audit, HOSTILE), HOSTILE))
    assert not met
    tab.locator("#factors svg.plot").focus()
    assert tab.locator("#factors .tip strong").inner_text().startswith("1 </script><img src=x")
    assert tab.locator("img").count() == 0
    # and were a name to break out, the page's policy would stop it
    broken = page.page(audit).replace("<main>", "<main><script>alert(1)</script><img src=x onerror=alert(2)>")
    _, met = opened(broken)
    assert "dialog" not in met
    assert sum("Content Security Policy" in what for what in met) >= 2


def test_chromium_without_scripts_shows_the_tables(opened, audit):
    tab, _ = opened(page.page(audit), java_script_enabled=False)
    assert tab.locator("tbody tr").count() == 5 + 6
    assert tab.locator("#factors noscript p").is_visible()
    assert not tab.locator("#factors .legend").count()
