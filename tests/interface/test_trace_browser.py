"""The trace page in a real browser: headless Chromium, driven by selenium, on files made with the bundled models.

Skipped if either is not installed, unless MINIGEN_BROWSER=required says that they must be.
"""

import json
import os
import re

import pytest

import minigen
from tests.chromium import MISSING, show, start

if "selenium" not in MISSING:
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

REQUIRED = os.environ.get("MINIGEN_BROWSER") == "required"
pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(bool(MISSING) and not REQUIRED, reason=f"not installed: {', '.join(MISSING)}"),
]

NASTY = "He </script><script>alert(1)</script><img src=x onerror=alert(2)> \u2028 \0 \"' \u202e \U0001f600 said"
KINDS = {
    "plain": {"max_tokens": 40, "seed": 1},
    "every filter": {"max_tokens": 12, "seed": 3, "top_k": 40, "min_p": 0.01, "typical_p": 0.95}
    | {"repetition_penalty": 1.2, "presence_penalty": 0.1, "no_repeat_ngram_size": 3, "temperature": 1.2},
    "beams": {"max_tokens": 20, "num_beams": 4, "num_return_sequences": 2},
    "beams that end": {"max_tokens": 20, "num_beams": 4, "early_stopping": "never", "length_penalty": 2.0}
    | {"stop": [".", ",", "!", " a", " and", " was", " who"]},
    "speculation": {"max_tokens": 40, "seed": 1, "draft_model": "distilfairytale"},
    "rejection": {"max_tokens": 40, "seed": 1, "draft_model": "distilfairytale", "speculation_rule": "rejection"},
    "n-grams": {"max_tokens": 60, "seed": 1, "prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 1},
    "window": {"max_tokens": 90, "seed": 1, "window": 16, "ignore_eos": True},
    "long window": {"max_tokens": 6, "seed": 1, "window": 8, "ignore_eos": True},
    "emoji": {"max_tokens": 20, "seed": 1},
    "no cache": {"max_tokens": 8, "seed": 1, "use_cache": False},
    "nasty": {"max_tokens": 4, "seed": 1},
    "one token": {"max_tokens": 0, "seed": 1},
    "greedy": {"max_tokens": 12, "temperature": 0},
    "shift": {"max_tokens": 12, "seed": 1, "context_shift": True, "keep": 3, "ignore_eos": True},
    "prompt cache": {"max_tokens": 12, "seed": 1},
}
FOX = "The \U0001f98a and the \U0001f468\u200d\U0001f469\u200d\U0001f467 said ß é \ufeff"
PROMPTS = {"nasty": NASTY, "one token": "Once", "emoji": FOX, "long window": "Once upon a time there was a king. " * 16}
PROMPTS["shift"] = "Once upon a time there was a king. " * 50 + "He had a"


@pytest.fixture(scope="module")
def browser():
    if MISSING:
        pytest.fail(f"MINIGEN_BROWSER is required, but these are not installed: {', '.join(MISSING)}")
    driver = start()
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """kind -> the file of a run and its data."""
    folder, made = tmp_path_factory.mktemp("pages"), {}

    def page(kind):
        if kind not in made:
            options = dict(KINDS[kind])
            if "draft_model" in options:
                options["draft_model"] = minigen.load(options["draft_model"])
            prompt = PROMPTS.get(kind, "Once upon a time")
            if kind == "prompt cache":
                options["cache"] = folder / "prompt.kv"
                minigen.generate(*minigen.load(), "Once upon a", cache=options["cache"], max_tokens=1)
            file = folder / f"{kind.replace(' ', '_')}.html"
            done = minigen.trace(*minigen.load(), prompt, file, **options)
            html = file.read_text(encoding="utf-8")
            made[kind] = file, json.loads(re.search('id="data">(.*?)</script>', html, re.DOTALL)[1]), done
        return made[kind]

    return page


TEXT = "return document.querySelector(arguments[0]).textContent"


def text(browser, id):
    return browser.find_element(By.ID, id).text


@pytest.mark.parametrize("kind", KINDS)
def test_a_page_runs_without_an_error_requests_nothing_and_fits_a_phone(browser, pages, kind):
    file, data, _ = pages(kind)
    show(browser, file, width=375)
    shown = "return ['header', 'main'].map((name) => document.querySelector(name).textContent).join()"
    for index in range(0, len(data["rows"][0]["ids"]), 15):
        browser.execute_script("chooseToken(arguments[0])", index)
        words = re.findall(r"\b(null|undefined|NaN|Infinity|True|False|None)\b", browser.execute_script(shown))
        assert words == []  # a program's words
    for step in range(0, len(data["steps"]), 15):
        browser.execute_script("chooseStep(arguments[0])", step)
        assert browser.execute_script("return document.documentElement.scrollWidth") == 375
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    asked = [event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"]
    assert asked == [file.as_uri()]
    assert browser.execute_script("return document.scripts.length") == 2


def test_the_policy_forbids_requests(browser, pages):
    show(browser, pages("plain")[0])
    script = "const done = arguments[0]; fetch('https://example.org').then(() => done('sent'), () => done('refused'))"
    assert browser.execute_async_script(script) == "refused"
    assert "Content Security Policy" in browser.get_log("browser")[0]["message"]


def test_a_click_shows_the_candidates(browser, pages):
    file, data, _ = pages("plain")
    show(browser, file)
    index = next(choice["at"] for choice in data["choices"] if choice["race"])
    browser.find_elements(By.CSS_SELECTOR, "#text .token")[index].click()
    choice = data["choices"][index - data["rows"][0]["n_prompt"]]
    assert text(browser, "choice-title").startswith(f"Token {index}: ")
    rows = browser.find_elements(By.CSS_SELECTOR, "#choice tbody tr")
    assert len(rows) == len(choice["candidates"])
    for row, (token, values) in zip(rows, choice["candidates"], strict=True):
        cells = [cell.text for cell in row.find_elements(By.TAG_NAME, "td")]
        assert data["vocabulary"][str(token)].strip() in cells[0].replace("↵", "\n")
        assert float(cells[1].removeprefix("≈")) == pytest.approx(values[0], rel=0.06, abs=5e-5)
        assert ("✕" in "".join(cells) or "·" in cells) == (values[-1] == 0)


def test_the_keyboard_reaches_all(browser, pages):
    file, data, _ = pages("plain")
    show(browser, file)
    focused = "return document.activeElement"
    browser.execute_script("document.querySelector(\"#text [tabindex='0']\").focus()")
    for key, expected in ((Keys.END, len(data["rows"][0]["ids"]) - 1), (Keys.HOME, 0), (Keys.ARROW_RIGHT, 1)):
        browser.switch_to.active_element.send_keys(key)
        assert text(browser, "choice-title").startswith(f"Token {expected}: ")
        assert browser.execute_script(focused).get_attribute("data-item") == str(expected)
    # Tab goes on to the slider's row, whose arrows move the ring, and to the heads.
    browser.find_element(By.ID, "step").send_keys(Keys.END)
    assert text(browser, "step-text").startswith(f"Step {len(data['steps'])} of ")
    browser.execute_script("document.querySelector(\"#heads [tabindex='0']\").focus()")
    browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.execute_script(focused).get_attribute("aria-label").startswith("layer 0, head 0")
    assert "layer 0, head 0" in text(browser, "attention-text")
    # One item of each group is in the order of Tab, and everything that can be pressed has a name.
    for group in ("#text", "#heads"):
        assert len(browser.find_elements(By.CSS_SELECTOR, f"{group} [tabindex='0']")) == 1
    # Up and down, Page Up and Page Down go ten tokens; the page's hint names all of these keys.
    show(browser, file)
    at = int(browser.execute_script(focused).get_attribute("data-item"))
    for key, name in ((Keys.ARROW_DOWN, "↓"), (Keys.ARROW_UP, "↑"), (Keys.PAGE_DOWN, "PgDn"), (Keys.PAGE_UP, "PgUp")):
        browser.switch_to.active_element.send_keys(key)
        at += 10 if key in (Keys.ARROW_DOWN, Keys.PAGE_DOWN) else -10
        assert browser.execute_script(focused).get_attribute("data-item") == str(at)
        assert name in [element.text for element in browser.find_elements(By.TAG_NAME, "kbd")]
    for element in browser.find_elements(By.CSS_SELECTOR, "button, input, select, [role=option]"):
        assert element.accessible_name.strip() or not element.is_displayed(), element.get_attribute("outerHTML")


def test_the_drafts_are_one_stop_of_the_keyboard(browser, pages):
    show(browser, pages("speculation")[0])
    drafts = browser.find_elements(By.CSS_SELECTOR, "#rounds button")
    stops = "return [...document.querySelectorAll('#rounds button')].flatMap((b, i) => b.tabIndex < 0 ? [] : [i])"
    assert browser.execute_script(stops) == [0]
    browser.execute_script("document.querySelector(\"#rounds [tabindex='0']\").focus()")
    for _ in range(7):
        browser.switch_to.active_element.send_keys(Keys.ARROW_RIGHT)
    assert browser.switch_to.active_element == drafts[7] and browser.execute_script(stops) == [7]
    assert text(browser, "choice-title").startswith(f"Token {drafts[7].get_attribute('data-item')}: ")
    drafts[3].click()
    assert browser.execute_script(stops) == [3]


def test_the_first_token_shown_was_not_certain(browser, pages):
    file, data, _ = pages("plain")
    show(browser, file)
    first = next(choice for choice in data["choices"] if choice["left"][-1] > 1)
    assert first["at"] > data["rows"][0]["n_prompt"]  # " upon a time" goes on with a comma
    assert text(browser, "choice-title").startswith(f"Token {first['at']}: ")
    assert browser.switch_to.active_element.get_attribute("data-item") == str(first["at"])


def test_a_page_says_what_it_is_a_run_of(browser, pages):
    file, data, _ = pages("emoji")
    show(browser, file)
    family = "\U0001f468U+200D\U0001f469U+200D\U0001f467"
    assert browser.title == f"The \U0001f98a and the {family} said ß é U … · minigen trace"  # 40 characters
    chips = [chip.text for chip in browser.find_elements(By.CSS_SELECTOR, "#options .chip")]
    assert chips == data["about"] and minigen.__version__ in chips[1]


def test_characters_of_several_tokens_can_be_read(browser, pages):
    file, *_ = pages("emoji")
    show(browser, file)
    above = [element.text for element in browser.find_elements(By.CSS_SELECTOR, "#text rt")]
    family = ["\U0001f468", "U+200D", "\U0001f469", "U+200D", "\U0001f467"]
    assert above == ["\U0001f98a", *family, "ß", "é", "U+FEFF"]
    # Each stands over the tokens whose bytes it is, and no token is broken over two lines, on a phone neither.
    for ruby, character in zip(browser.find_elements(By.CSS_SELECTOR, "#text ruby"), above, strict=True):
        code = "".join(token.text.replace("\\x", "") for token in ruby.find_elements(By.CLASS_NAME, "token"))
        whole = chr(int(character[2:], 16)) if character.startswith("U+") else character
        assert bytes.fromhex(code).decode() == whole
    show(browser, file, width=375)
    lines = "return [...document.querySelectorAll('.token.bytes')].map((token) => token.getClientRects().length)"
    assert set(browser.execute_script(lines)) == {1}
    browser.find_elements(By.CSS_SELECTOR, "#text .token")[2].click()
    assert text(browser, "choice-title").endswith("a part of \U0001f98a")
    assert text(browser, "attention-text").startswith("To predict “")
    assert browser.find_element(By.ID, "bytes-text").is_displayed()
    show(browser, pages("plain")[0])
    assert not browser.find_element(By.ID, "bytes-text").is_displayed()


def test_a_wide_table_keeps_its_names_and_marks_what_changed_nothing(browser, pages):
    file, data, _ = pages("every filter")
    show(browser, file, width=375)
    box, name = (browser.find_element(By.CSS_SELECTOR, f"#choice {part}") for part in (".scroll", "tbody td"))
    left = name.rect["x"]
    browser.execute_script("arguments[0].scrollLeft = 200", box)
    assert browser.execute_script("return arguments[0].scrollLeft", box) == 200
    assert name.rect["x"] == left
    colours = "[...document.querySelectorAll('#choice td:first-child')].map((cell) => getComputedStyle(cell))"
    card = browser.execute_script("return getComputedStyle(document.querySelector('.card')).backgroundColor")
    assert set(browser.execute_script(f"return {colours}.map((style) => style.backgroundColor)")) == {
        card
    }  # what scrolls behind them does not show
    cells = (
        "return [...document.querySelectorAll('#choice tbody tr')].map((row) => [...row.cells].map((c) => c.innerText))"
    )
    idle = 0
    for choice in data["choices"]:
        browser.execute_script("chooseToken(arguments[0])", choice["at"])
        rows = browser.execute_script(cells)
        for column in range(1, len(data["stages"])):
            before, after = ([values[i] for _, values in choice["candidates"]] for i in (column - 1, column))
            same = before == after and choice["left"][column - 1] == choice["left"][column]
            assert [row[column + 1] == "=" for row in rows] == [same] * len(rows)
            idle += same
    assert 0 < idle < len(data["choices"]) * (len(data["stages"]) - 1)


@pytest.mark.parametrize("kind", ["shift", "prompt cache"])
def test_shifts_and_restored_prompts_are_explained_and_prompts_can_be_inspected(browser, pages, kind):
    """F24: pages that throw after a context shift or a restored prompt."""
    file, data, _ = pages(kind)
    show(browser, file)
    sentence = {
        "shift": "the context is full, so the older half of the text is dropped.",
        "prompt cache": r"the keys and values of \d tokens are read from the prompt cache.",
    }[kind]
    told = []
    for at, step in enumerate(data["steps"]):
        browser.execute_script("chooseStep(arguments[0])", at)
        if step["kind"] != "pass":
            told.append(text(browser, "step-text"))
    assert len(told) == 1 and re.search(sentence, told[0])
    for index in (1, 3):
        browser.execute_script("chooseToken(arguments[0])", index)
        assert text(browser, "choice-title").startswith(f"Token {index}: ")
        assert "part of the prompt" in text(browser, "choice-body")
    if kind == "shift":  # the slots that it emptied are named by the tokens that they held
        at = [step["kind"] for step in data["steps"]].index("shifted")
        browser.execute_script("chooseStep(arguments[0])", at)
        titles = browser.execute_script(
            "return [...document.querySelectorAll('.slot.undone')].map((s) => s.textContent)"
        )
        ids, vocabulary = data["rows"][0]["ids"], data["vocabulary"]
        for title in titles:
            position = int(re.search(r"position (\d+)", title)[1])
            assert title.endswith(f"“{vocabulary[str(ids[position])]}”".replace(" ", "\u00a0").replace("\n", "↵"))
        assert len(titles) > 250


def test_without_a_cache_the_page_says_so(browser, pages):
    for kind in ("plain", "no cache"):
        show(browser, pages(kind)[0])
        assert browser.find_element(By.ID, "no-cache").is_displayed() == (kind == "no cache")


def test_the_ring_shows_what_is_visible(browser, pages):
    file, data, _ = pages("window")
    show(browser, file)
    browser.execute_script("chooseStep(arguments[0])", len(data["steps"]) - 1)
    ring = data["steps"][-1]["rows"]["0"]
    kinds = browser.execute_script("return [...document.querySelectorAll('.slot')].map((slot) => slot.classList[1])")
    assert len(kinds) == data["steps"][-1]["capacity"] == 16 + 63
    assert (kinds.count("written"), kinds.count("visible"), kinds.count("hidden")) == (1, 15, 63)
    assert kinds.index("written") == (ring["length"] - 1) % 79
    assert f"{ring['length'] - 1 - 79}, which the window no longer includes" in text(browser, "step-text")


def test_the_ring_counts_what_is_left_in_it(browser, pages):
    file, data, _ = pages("long window")
    show(browser, file)
    legend = text(browser, "ring-legend")
    assert "outside the window" in legend and "removed" not in legend
    found = []
    labels = "return [...document.querySelectorAll('#ring-picture > text')].map((label) => label.textContent)"
    slots = "return [...document.querySelectorAll('.slot')].map((slot) => slot.classList[1])"
    for at, step in enumerate(data["steps"]):
        ring = step["rows"]["0"]
        browser.execute_script("view.step = arguments[0]; drawRing()", at)
        words = browser.execute_script(labels)
        assert words[1] == str(min(71, ring["length"])) and words[2] == "in 71 slots"
        assert words[3] == (f"of {ring['length']} tokens" if ring["length"] > 71 else "tokens")
        first, end = ring["written"]
        kinds = browser.execute_script(slots)
        seen = end - max(first, end - 8)
        assert (kinds.count("written"), kinds.count("passed")) == (seen, end - first - seen)
        if end - first > 1:
            found.append(text(browser, "step-text"))
    # The prompt's 160 tokens come in three passes, of which the third goes around the end of 71 slots.
    assert "writes positions 135 to 159 to slots 64 to 70 and 0 to 17. Its last query" in found[2]
    assert "It overwrites positions 64 to 88, which" in found[2]


@pytest.mark.parametrize("kind", ["speculation", "rejection", "n-grams"])
def test_a_race_shows_who_came_first_and_second(browser, pages, kind):
    file, data, _ = pages(kind)
    stages, outcomes, coupled = len(data["stages"]), set(), kind != "rejection"
    show(browser, file)
    assert "The token with the smallest E / p is drawn" in browser.execute_script(TEXT, "#draw-help")
    assert ("with the same random numbers" in browser.execute_script(TEXT, "#rule")) == coupled
    for choice in data["choices"]:
        browser.execute_script("chooseToken(arguments[0])", choice["at"])
        names, *rows = browser.execute_script(
            "return [...document.querySelectorAll('#choice tr')].map((row) => [...row.cells].map((c) => c.textContent))"
        )
        draft = choice.get("draft")
        has_q, race = bool(draft) and kind != "n-grams", dict(choice["race"] or [])
        replaced = bool(draft) and not coupled and not draft["accepted"]
        drawn_from = "max(p − q, 0)" if replaced else "p"
        own, its = ["E", f"E / {drawn_from}"] * bool(race), ["q, the draft's"] * has_q
        expected = (
            [*own, *its, *["E / q"] * (has_q and bool(race))] if coupled else [*its, *[drawn_from] * replaced, *own]
        )
        # Each race's column, the value that it divides by, and the token that comes first.
        races = {f"E / {drawn_from}": (stages + 1 if replaced else stages - 1, choice["token"])}
        races |= {"E / q": (stages, draft["token"])} if has_q else {}
        assert names[stages + 1 :] == expected
        for column, (values_at, first) in ((names.index(name), races[name]) for name in races if name in names):
            times = {id: race[id] / v[values_at] for id, v in choice["candidates"] if id in race and v[values_at]}
            order = sorted(times, key=times.get)
            for (id, _), row in zip(choice["candidates"], rows, strict=False):
                cell = row[column]
                if id not in times:
                    assert cell == "·"
                    continue
                rank = ["1st ", "2nd ", ""][min(order.index(id), 2)]
                assert cell.startswith(rank)
                assert float(cell.removeprefix(rank)) == pytest.approx(times[id], rel=0.06, abs=6e-5)
            assert order[0] == first
        shown = text(browser, "choice-body")
        assert ("First came" in shown) == ("Second came" in shown) == bool(race)
        if draft:
            outcomes.add(draft["accepted"])
            assert ("✓ accepted" if draft["accepted"] else "✗ rejected") in shown
            assert ("had the smallest E / q" in shown) == (has_q and coupled and bool(race))
            if not coupled:
                assert f"the random number was {draft['u']:.4f}" in shown
                needle = browser.find_element(By.CSS_SELECTOR, "#choice .bar line")
                assert float(needle.get_attribute("x1")) == pytest.approx(600 * draft["u"])
    assert outcomes == {True, False} and browser.get_log("browser") == []


def test_speculation_shows_each_draft(browser, pages):
    file, _, done = pages("speculation")
    show(browser, file)
    stats = done[0].speculation
    found = browser.find_elements(By.CSS_SELECTOR, "#rounds .draft:not(.own)")
    marks = [element.text[:1] for element in found]
    assert (len(found), marks.count("✓")) == (stats.drafted, stats.accepted)
    rejected = next(element for element in found if element.text.startswith("✗"))
    rejected.click()
    assert "✗ rejected" in text(browser, "choice")
    assert len(browser.find_elements(By.CSS_SELECTOR, "#rounds li.now")) == 1
    # The step after it removes the rejected tokens.
    browser.execute_script("chooseStep(view.step + 1)")
    marks = [element.text[:1] for element in browser.find_elements(By.CSS_SELECTOR, "#rounds li.now .draft")]
    dropped = f" and {marks.count('–')} dropped after it are" if "–" in marks else " is"
    assert f": the rejected draft{dropped} removed from the cache" in text(browser, "step-text")
    assert browser.find_elements(By.CSS_SELECTOR, ".slot.undone")


def test_the_tree_shows_each_beam(browser, pages):
    file, data, done = pages("beams")
    show(browser, file)
    entries = [entry for step in data["beams"] for entry in step["candidates"]]
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree circle")) == 1 + sum("row" in entry for entry in entries)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree .ended")) == sum("score" in entry for entry in entries)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree .path")) == len(done[0].token_ids)
    select = browser.find_element(By.ID, "row")
    select.send_keys(Keys.ARROW_DOWN)
    assert len(browser.find_elements(By.CSS_SELECTOR, "#tree .path")) == len(done[1].token_ids)


def test_a_finished_texts_score_follows_from_its_sum(browser, pages):
    file, data, _ = pages("beams that end")
    show(browser, file)
    found = 0
    for column, step in enumerate(data["beams"]):
        browser.execute_script("drawBranch(arguments[0])", column)
        for row, entry in zip(
            browser.find_elements(By.CSS_SELECTOR, "#branch tbody tr"), step["candidates"], strict=True
        ):
            if "score" in entry:
                words = re.search(r"score (\S+) = sum (\S+) / (\d+) tokens? \*\* (\S+?)(?:,|$)", row.text)
                score, total, n, penalty = map(float, words.groups())
                assert score == pytest.approx(entry["score"], abs=1e-4)
                assert score == pytest.approx(total / n**penalty, abs=2e-4)
                found += 1
    assert found > 4


def test_no_two_words_of_the_tree_overlap(browser, pages):
    file, data, _ = pages("beams that end")
    show(browser, file)
    ends = [[entry["parent"] for entry in step["candidates"] if "score" in entry] for step in data["beams"]]
    assert any(len(set(parents)) < len(parents) for parents in ends)  # two texts that end in one lane at one step
    boxes = browser.execute_script(
        "return [...document.querySelectorAll('#tree text')].map((text) => [text.textContent, text.getBBox()])"
    )
    for i, (_, a) in enumerate(boxes):
        for _, b in boxes[:i]:
            across = min(a["x"] + a["width"], b["x"] + b["width"]) - max(a["x"], b["x"])
            down = min(a["y"] + a["height"], b["y"] + b["height"]) - max(a["y"], b["y"])
            assert across <= 1 or down <= 5, (a, b)  # a box is higher than its letters


def luminance(colour):
    parts = [int(part) / 255 for part in re.findall(r"\d+", colour)[:3]]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize("dark", [False, True])
def test_light_and_dark_can_be_read(browser, pages, dark):
    show(browser, pages("speculation")[0], dark=dark)
    colour = "return getComputedStyle(document.querySelector(arguments[0]))[arguments[1]]"
    card = luminance(browser.execute_script(colour, ".card", "backgroundColor"))
    assert card < 0.05 if dark else card > 0.9
    for selector in ("#text", ".muted", ".draft.yes", ".draft.no", "td.cut", "#text .token"):
        ink = luminance(browser.execute_script(colour, selector, "color"))
        # WCAG's contrast for text; it asks for 4.5.
        assert (max(ink, card) + 0.05) / (min(ink, card) + 0.05) >= 4.5, selector
