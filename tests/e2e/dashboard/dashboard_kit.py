"""A live server with its dashboard, and a real browser that looks at it: what it asked for, and what went wrong."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import time
from urllib.parse import urlsplit

import install_browser
from e2e_kit import open_live_server
from loopback_kit import FAMILY, LOOPBACK, loopback
from process_kit import children
from selenium import webdriver
from selenium.common.exceptions import StaleElementReferenceException, WebDriverException
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By

from flowctl.core.text.addresses import bracketed
from flowctl.live.admin.listener import AdminListener
from flowctl_servers.live import SERVER

PATIENCE_S = 20.0
FLAGS = (
    *install_browser.FLAGS,
    "--disable-dev-shm-usage",
    "--mute-audio",
    "--hide-scrollbars",
    "--lang=en",
)
PAGE_HOST = LOOPBACK if FAMILY == socket.AF_INET else "localhost"
"""A page at an address of IPv6 may load media from its own port alone."""
WIDE, PHONE = (1280, 900), (400, 800)
COLOURS = "const s = getComputedStyle(arguments[0]); return [s.color, s.backgroundColor];"


@contextlib.contextmanager
def open_dashboard(**options):
    options.setdefault("admin", loopback())
    with open_live_server(make=SERVER.build, **options) as server:
        (admin,) = [item for item in server.companions if isinstance(item, AdminListener)]
        yield server, admin.bound[0].replace(bracketed(LOOPBACK), PAGE_HOST)


class Browser:
    """Chromium, driven."""

    def __init__(self, folder):
        options = Options()
        options.binary_location = shutil.which("chromium")
        for flag in (*FLAGS, f"--user-data-dir={folder}", "--window-size=1280,900"):
            options.add_argument(flag)
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
        self.driver.set_page_load_timeout(PATIENCE_S)
        self.driver.set_script_timeout(PATIENCE_S)
        self._log = []

    def close(self):
        with contextlib.suppress(WebDriverException):
            self.driver.quit()
        end = time.monotonic() + PATIENCE_S  # its helpers end some time after it
        while any("chrom" in command or not command for command in children().values()) and time.monotonic() < end:
            time.sleep(0.05)

    def open(self, address, *, size=WIDE, scheme="light"):
        self.emulate(size, scheme)
        self.driver.get("about:blank")
        self._log.clear()
        for kind in ("browser", "performance"):
            self.driver.get_log(kind)
        self.driver.get(address)

    def emulate(self, size=WIDE, scheme="light"):
        """Have a screen of that size, and a reader who likes it light or dark."""
        width, height = size
        device = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", device)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def find(self, css):
        """Return the first element that fits. None: there is none."""
        return next(iter(self.driver.find_elements(By.CSS_SELECTOR, css)), None)

    def text(self, css):
        return self.run("return document.querySelector(arguments[0])?.textContent ?? ''", css)

    def texts(self, css):
        return self.run("return [...document.querySelectorAll(arguments[0])].map((item) => item.textContent)", css)

    def click(self, css):
        def clicked():
            try:
                element = self.find(css)
                if element is None or not element.is_displayed() or not element.is_enabled():
                    return False
                self.run("arguments[0].scrollIntoView({block: 'center'})", element)
                element.click()
            except StaleElementReferenceException:
                return False
            return True

        self.wait(clicked, f"{css} to click")

    def fill(self, css, text):
        field = self.wait(lambda: self.find(css), css)
        field.clear()
        field.send_keys(text)

    def wait(self, condition, what, timeout_s=PATIENCE_S):
        """Return the first true value of `condition()`; fail, with what the page says, when none came in time."""
        end = time.monotonic() + timeout_s
        while not (value := condition()):
            if time.monotonic() > end:
                shown = self.run("return document.body.innerText")
                raise AssertionError(
                    f"not within {timeout_s:g} s: {what}; the page says:\n{shown[:3000]}\n{self.faults()}"
                )
            time.sleep(0.02)
        return value

    def faults(self):
        """Return what the browser complained about: errors of scripts, of the policy, of requests."""
        self._log += self.driver.get_log("browser")
        return [item["message"] for item in self._log if item["level"] in {"SEVERE", "WARNING"}]

    def hosts(self):
        """Return the hosts that the page sent anything to since it was opened, by the browser's own account."""
        found = set()
        for line in self.driver.get_log("performance"):
            said = json.loads(line["message"])["message"]
            if said["method"] in {"Network.requestWillBeSent", "Network.webSocketCreated"}:
                parameters = said["params"]
                address = urlsplit(parameters.get("request", parameters)["url"])
                if address.scheme in {"http", "https", "ws", "wss"}:
                    found.add(address.hostname)
        return found


def why_not():
    """Return why there is no browser here; "" where there is one."""
    return install_browser.no_browser()


def luminance(colour):
    """Return how light a colour of CSS is, 0 to 1, as WCAG 2 has it."""
    parts = [float(part) / 255 for part in colour[colour.index("(") + 1 : -1].replace("/", ",").split(",")[:3]]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one, other):
    """Return the contrast of two colours, 1 to 21, as WCAG 2 has it."""
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)
