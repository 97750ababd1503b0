"""Headless Chromium for the trace page, used by its tests and by trace_figures.py."""

import shutil

try:
    from selenium import webdriver
except ImportError:
    webdriver = None

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
MISSING = [
    name for name, there in {"selenium": webdriver, "chromium": CHROMIUM, "chromedriver": DRIVER}.items() if not there
]
# Chromium is to make no requests of its own; without partial raster a page gives the same picture each time.
FLAGS = "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
FLAGS += " --disable-component-update --disable-sync --disable-partial-raster"


def start():
    """A driver with a fresh profile that keeps the logs of the console and of the network."""
    options = webdriver.ChromeOptions()
    for flag in FLAGS.split():
        options.add_argument(flag)
    options.binary_location = CHROMIUM
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    return webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))


def show(driver, file, width=1280, height=800, dark=False):
    """Open a trace page and wait until its attention weights are unpacked."""
    size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": scheme})
    for log in ("browser", "performance"):
        driver.get_log(log)  # empties it
    driver.get(file.as_uri())
    unpacked = "const wait = () => view.attention || view.problem ? arguments[0]() : setTimeout(wait, 20); wait()"
    driver.execute_async_script(unpacked)
