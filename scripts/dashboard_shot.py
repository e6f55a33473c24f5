"""Check the dashboard in a real browser: `make dashboard-shot` starts a server, streams, and loads the page twice.

It fails if no Chromium is installed, if a figure is missing or does not change, or if the page asks another host for
anything. Pictures, light and dark, go to build/dashboard-*.png.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from pathlib import Path

from llmcore_devtools.fake_files import write_fake_model
from llmcore_devtools.server import RunningServer, serving

OUT = Path(__file__).resolve().parent.parent / "build"
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
WARM_SECONDS = 45
STREAMS = 24
FAILED: list[str] = []
"""The errors that ended streams."""
TILES = ("Generated", "Running", "First token", "Between tokens", "KV live", "Prefix hits")


def main() -> int:
    """Returns 0 if the page shows what it should."""
    browser = next((path for name in BROWSERS if (path := shutil.which(name))), None)
    if browser is None:
        print("no Chromium is installed: apt-get install chromium (or your system's package), then run this again")
        return 2
    OUT.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as scratch:
        model = write_fake_model(Path(scratch), step_delay=0.02)
        with serving(model, model_name="demo", admin_port=0, max_total_token_num=16384, log_level="WARNING") as server:
            return _look(browser, server, Path(scratch))


def _look(browser: str, server: RunningServer, scratch: Path) -> int:
    url = f"http://127.0.0.1:{server.admin_port}/dashboard"
    stop = threading.Event()
    clients = [threading.Thread(target=_client, args=(server.url, stop, n), daemon=True) for n in range(STREAMS)]
    for client in clients:
        client.start()
        time.sleep(0.3)
    time.sleep(WARM_SECONDS)
    first = _tiles(_browse(browser, url, scratch, "--dump-dom"))
    for name, scheme in (("light", 1), ("dark", 0)):
        picture = OUT / f"dashboard-{name}.png"
        _browse(browser, url, scratch, f"--screenshot={picture}", f"--blink-settings=preferredColorScheme={scheme}")
        print(f"{picture}: {picture.stat().st_size:,} bytes")
    second = _tiles(_browse(browser, url, scratch, "--dump-dom"))
    stop.set()
    wrong = [name for name in TILES if first.get(name, "–").startswith("–")]
    still = first == second
    print(json.dumps({"first": first, "second": second}, ensure_ascii=False, indent=2))
    if FAILED or wrong or still:
        print(FAILED or (f"without a figure: {wrong}" if wrong else "the figures do not move"))
        return 1
    return 0


def _client(url: str, stop: threading.Event, seed: int) -> None:
    """Streams answers one after the other. Many of their prompts begin alike."""
    draw = random.Random(seed)
    while not stop.is_set():
        prompt = [7 + i % 50 for i in range(draw.choice((64, 128, 256)))] + [
            draw.randrange(60, 200) for _ in range(40)
        ]
        body = {"model": "demo", "prompt": prompt, "max_tokens": draw.randrange(20, 160), "stream": True}
        request = urllib.request.Request(
            f"{url}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                answer.read()
        except OSError as error:
            FAILED.append(str(error))
            return
        time.sleep(draw.random() * 2)


def _browse(browser: str, url: str, scratch: Path, *arguments: str) -> str:
    """Runs a headless browser with a temporary profile and access to this host alone. Returns its output."""
    command = [
        *(browser, "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--window-size=1280,1420"),
        *(f"--user-data-dir={scratch / 'profile'}", "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1"),
        *("--disable-background-networking", "--virtual-time-budget=4000", *arguments, url),
    ]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode:
        raise SystemExit(f"{browser} failed:\n{done.stderr[-2000:]}")
    return done.stdout


def _tiles(dom: str) -> dict[str, str]:
    found = re.findall(r'<div class="card tile"><h2[^>]*>([^<]+)</h2><div class="value">([^<]*)<', dom)
    return dict(found)


if __name__ == "__main__":
    sys.exit(main())
