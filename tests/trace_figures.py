"""The two pictures of the trace in README, by headless Chromium and selenium:

    python -m tests.trace_figures

writes benchmarks/figures/trace.png and trace_speculation.png.
"""

import shutil
import tempfile
from pathlib import Path

from selenium import webdriver

import minigen

FIGURES = Path(__file__).resolve().parents[1] / "benchmarks" / "figures"


def picture(driver, page, name, token, width, height, dark=False, start="header"):
    """A page after a click on a token, from the element `start` on."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    driver.get(page.as_uri())
    driver.execute_async_script("unpackAttention().then(arguments[0])")
    script = "chooseToken(arguments[0]); scrollTo(0, document.querySelector(arguments[1]).offsetTop - 14)"
    driver.execute_script("document.documentElement.style.scrollbarWidth = 'none'")
    driver.execute_script(script, token, start)
    driver.save_screenshot(str(FIGURES / name))


def main():
    options = webdriver.ChromeOptions()
    for flag in "headless no-sandbox disable-gpu no-first-run disable-background-networking".split():
        options.add_argument(f"--{flag}")
    options.binary_location = shutil.which("chromium")
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    model, tokenizer = minigen.load()
    draft = minigen.load("distilfairytale")
    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "trace.html"
        minigen.trace(model, tokenizer, "Once upon a time", page, max_tokens=60, seed=1)
        picture(driver, page, "trace.png", 27, 1000, 1200)
        minigen.trace(model, tokenizer, "Once upon a time", page, max_tokens=60, seed=1, draft_model=draft)
        picture(driver, page, "trace_speculation.png", 30, 1000, 1030, dark=True, start="#choice")
    driver.quit()


if __name__ == "__main__":
    main()
