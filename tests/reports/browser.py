"""A headless Chromium for tests and for docs/screenshots.py."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from typing import Any

WIDE, PHONE = (1280, 860), (390, 844)
SERIOUS = ("serious", "critical")
PATIENCE_S = 600


def missing() -> str:
    """Missing parts of a browser; empty where everything is there."""
    import importlib.util

    programs = [name for name in ("chromium", "chromedriver") if shutil.which(name) is None]
    modules = [name for name in ("selenium", "axe_core_python") if importlib.util.find_spec(name) is None]
    return ", ".join([*programs, *modules])


@contextlib.contextmanager
def opened(
    size: tuple[int, int] = WIDE, *, dark: bool = False, more_flags: Sequence[str] = ()
) -> Iterator[Any]:
    """A browser's driver (selenium)."""
    from selenium import webdriver
    from selenium.webdriver.chrome.service import Service

    options = webdriver.ChromeOptions()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        "--disable-dev-shm-usage",
        *more_flags,
    ):
        options.add_argument(flag)
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        driver.set_script_timeout(PATIENCE_S)
        driver.command_executor.client_config.timeout = PATIENCE_S  # of the answer to such a script
        resize(driver, size)
        scheme(driver, dark=dark)
        yield driver
    finally:
        driver.quit()


def resize(driver: Any, size: tuple[int, int]) -> None:
    """A window of so many pixels, narrower than a real one can be."""
    width, height = size
    metrics = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
    driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def scheme(driver: Any, *, dark: bool) -> None:
    """Colour scheme that the reader prefers."""
    features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})


def faults(driver: Any) -> list[str]:
    """Faults that axe-core calls serious in the page."""
    from axe_core_python.selenium import Axe

    found = Axe().run(driver)["violations"]
    return [f"{one['id']}: {one['nodes'][0]['html'][:200]}" for one in found if one["impact"] in SERIOUS]
