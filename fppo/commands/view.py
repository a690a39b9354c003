"""The action of `fppo view`, after its arguments are parsed."""

from __future__ import annotations

import secrets
from pathlib import Path

from fppo._errors import UsageError, printable
from fppo.commands.options import ViewOptions
from fppo.report import view_page, view_server, viewed
from fppo.report.view_server import Viewed


def view(options: ViewOptions) -> int:
    """Serve runs until ctrl-C, or write them to one page; returns the exit status, 0. Raises UsageError for paths
    without a run, and for options that do not go together."""
    if not options.runs:
        raise UsageError("give the output_dir of a run: fppo view RUN [RUN ...]")
    if options.export is not None and options.port:
        raise UsageError(f"--port {options.port}: a page that is exported has no server; leave --port or --export out")
    try:
        runs = viewed.find_runs(options.runs)
    except ValueError as error:
        raise UsageError(str(error)) from error
    if options.export is not None:
        return _export(runs, Path(options.export), options.export_mb)
    served = Viewed(runs=runs, titles=viewed.titles(runs), key=secrets.token_urlsafe(18))
    try:
        running = view_server.server(served, options.port)
    except OSError as error:
        raise UsageError(f"--port {options.port}: {error}; give another, or 0 for any free one") from error
    try:
        print(f"{view_server.address_of(served, running)}\n\nOpen it in a browser; ctrl-C ends it.", flush=True)
        running.serve_forever()
    except KeyboardInterrupt:
        print()
    finally:
        running.server_close()
    return 0


def _export(runs: list[Path], target: Path, megabytes: float) -> int:
    if target.is_dir():
        raise UsageError(f"--export {target}: a directory; give a file")
    path = view_page.export(runs, target, most_bytes=megabytes * 1e6)
    print(f"{printable(str(path))} ({path.stat().st_size / 1e6:.1f} MB)")
    return 0
