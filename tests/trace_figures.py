"""The two pictures of the trace in README and docs, by headless Chromium and selenium:

    python -m tests.trace_figures

writes docs/figures/trace.png and trace_speculation.png.
"""

import tempfile
from pathlib import Path

from selenium.webdriver.common.by import By

import minigen
from tests import chromium

FIGURES = Path(__file__).resolve().parents[1] / "docs" / "figures"


def picture(driver, file, name, token, width, height, dark=False, start="header"):
    """A page after a click on a token, from the element `start` on."""
    chromium.show(driver, file, width, height, dark)
    driver.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
    driver.find_element(By.CSS_SELECTOR, f"#text [data-item='{token}']").click()
    driver.execute_script("scrollTo(0, document.querySelector(arguments[0]).offsetTop - 14)", start)
    driver.save_screenshot(str(FIGURES / name))


def main():
    driver = chromium.start()
    model, tokenizer = minigen.load()
    draft = minigen.load("distilfairytale")
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.html"
        minigen.trace(model, tokenizer, "Once upon a time", file, max_tokens=60, seed=11)
        picture(driver, file, "trace.png", 50, 1000, 1200)
        minigen.trace(model, tokenizer, "Once upon a time", file, max_tokens=60, seed=11, draft_model=draft)
        picture(driver, file, "trace_speculation.png", 35, 1200, 1030, dark=True, start="#choice")
    driver.quit()


if __name__ == "__main__":
    main()
