"""A headless browser: a chromium that is installed, or the one in PyQt6-WebEngine (``pip install 'autopar[browser]'``).

``python -m tests.browser PAGE.html PICTURE.png`` opens a page and takes a picture.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

CHROMIUM = ("chromium", "chromium-browser", "google-chrome", "chrome")
SECONDS = 60


def missing() -> str:
    """Why there is no browser; empty if there is one."""
    installed = importlib.util.find_spec("PyQt6") and importlib.util.find_spec("PyQt6.QtWebEngineWidgets")
    if any(map(shutil.which, CHROMIUM)) or installed:
        return ""
    return "needs a browser: chromium, or pip install 'autopar[browser]'"


def opened(page: Path, picture: Path | None = None) -> str:
    """The document after its scripts have run, as HTML.

    Raises:
        RuntimeError: the browser fails; says what it printed.
        subprocess.TimeoutExpired: it does not end.
    """
    binary = next(filter(None, map(shutil.which, CHROMIUM)), None)
    if binary is not None:
        command = [binary, "--headless=new", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=5000"]
        shot = [f"--screenshot={picture}", "--window-size=1200,2400"] if picture else []
        command = [*command, *shot, "--dump-dom", page.resolve().as_uri()]
    else:
        command = [sys.executable, "-m", "tests.browser", str(page), *([str(picture)] if picture else [])]
    own = {"QT_QPA_PLATFORM": "offscreen", "QTWEBENGINE_DISABLE_SANDBOX": "1"}
    flags = {"QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu"}
    root = Path(__file__).resolve().parents[1]
    found = subprocess.run(
        command, env={**os.environ, **own, **flags}, cwd=root, capture_output=True, text=True, timeout=SECONDS
    )
    if found.returncode or not found.stdout:
        raise RuntimeError(f"{command[0]} failed: {found.stderr[-2000:]}")
    return found.stdout


def _open_with_qt(page: Path, picture: Path | None) -> None:
    from PyQt6.QtCore import QTimer, QUrl
    from PyQt6.QtWebEngineWidgets import QWebEngineView
    from PyQt6.QtWidgets import QApplication

    application = QApplication(sys.argv[:1])
    view = QWebEngineView()
    view.resize(1200, 2400)

    def show(text: str) -> None:
        if picture is not None:
            view.grab().save(str(picture))
        print(text, flush=True)
        application.quit()

    view.loadFinished.connect(lambda _: QTimer.singleShot(500, lambda: view.page().toHtml(show)))
    view.load(QUrl.fromLocalFile(str(page.resolve())))
    view.show()
    QTimer.singleShot(1000 * SECONDS // 2, lambda: application.exit(1))
    raise SystemExit(application.exec())


if __name__ == "__main__":
    _open_with_qt(Path(sys.argv[1]), Path(sys.argv[2]) if len(sys.argv) > 2 else None)
