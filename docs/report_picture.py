"""Take the picture of a report for the README: `python docs/report_picture.py runs/quickstart`.

The head of the run's report.html as a browser without a window shows it; needs Chromium.
"""

import shutil
import subprocess
import sys
from pathlib import Path

PICTURE = Path(__file__).parent / "pictures" / "report.png"
WIDTH, HEIGHT = 1100, 716  # pixels: the tiles and two rows of curves


def main(run: str) -> None:
    """Write PICTURE. Raises ValueError if the run has no report, or no browser is found."""
    report = Path(run).resolve() / "report.html"
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if not report.exists() or browser is None:
        raise ValueError(f"{report} must exist (`fppo report {run}` writes it), and Chromium be on the PATH")
    window = ["--headless", "--no-sandbox", "--hide-scrollbars", f"--window-size={WIDTH},{HEIGHT}"]
    subprocess.run([browser, *window, f"--screenshot={PICTURE}", report.as_uri()], check=True, capture_output=True)


if __name__ == "__main__":
    main(sys.argv[1])
