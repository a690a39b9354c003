"""Everything that wants a GPU, checked and timed in one call of some minutes, with a verdict on each thing that may be
wrong: pass or fail, the number and its limit.

    PYTHONPATH=.:kernels python experiments/bench/gpu.py --json gpu.json
    PYTHONPATH=.:kernels python experiments/bench/gpu.py --sections update decode   # some of it
    PYTHONPATH=.:kernels python experiments/bench/gpu.py --tune     # the Triton log-probs in other tilings, besides
    PYTHONPATH=.:kernels python experiments/bench/gpu.py --dry-run  # tiny shapes on the CPU, to try the script out

It needs torch, triton, transformers and attrs; vLLM is tried where it is installed, collectives with two GPUs or more.
The exit status is 1 if a verdict is a fail; in a dry run, whose numbers mean nothing, if anything raised.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from gpu_tools import FULL, TINY, Plan, Record, Skipped, attempt, shown

SECTIONS = {
    "log_probs": "gpu_kernels:bench_log_probs",
    "attention": "gpu_kernels:bench_attention",
    "gae": "gpu_kernels:bench_gae",
    "adamw": "gpu_kernels:bench_adamw",
    "ragged": "gpu_step:bench_ragged",
    "update": "gpu_step:bench_update",
    "trace": "gpu_trace:bench_trace",
    "shared": "gpu_shared:bench_shared",
    "recorded": "gpu_recorded:bench_recorded",
    "float8": "gpu_float8:bench_float8",
    "decode": "gpu_step:bench_decode",
    "interrupt": "gpu_interrupt:bench_interrupt",
    "exact": "gpu_exact:bench_exact",
    "offload": "gpu_step:bench_offload",
    "collectives": "gpu_ranks:bench_collectives",
    "vllm": "gpu_vllm:bench_vllm",
    "runs": "gpu_runs:bench_runs",
    "laws": "gpu_kernels:check_laws",
}


def section(name: str, plan: Plan, tune: bool) -> list[Record]:
    """A section's records and verdicts; that it raised is a verdict too."""
    module, function = SECTIONS[name].split(":")
    try:
        run: Callable[..., list[Record]] = getattr(import_module(module), function)
        return run(plan, tune) if name == "log_probs" else run(plan)
    except Skipped as reason:
        print(f"\n{name}: left out: {reason}")
        return [{"name": name, "absent": str(reason)}]
    except Exception as error:
        return [{"name": name, "error": f"{type(error).__name__}: {error}"[:500], "passed": False}]
    finally:
        if plan.device.type == "cuda":
            torch.cuda.empty_cache()


def main(plan: Plan, sections: Sequence[str], tune: bool = False, path: Path | None = None) -> dict[str, Any]:
    """Runs the sections, prints a table of each and all verdicts, and writes all numbers as JSON after each section."""
    named = torch.cuda.get_device_name() if plan.device.type == "cuda" else "CPU: a dry run, its numbers mean nothing"
    results: dict[str, Any] = {"device": named, "torch": torch.__version__}
    results["triton"] = attempt(lambda: {"version": import_module("triton").__version__}).get("version")
    print(f"{named}, torch {results['torch']}, triton {results['triton']}")
    verdicts: list[Record] = []
    for name in sections:
        start = time.perf_counter()
        results[name] = section(name, plan, tune)
        verdicts += [{"section": name, **record} for record in results[name] if "passed" in record]
        results |= {"verdicts": verdicts, "passed": all(verdict["passed"] for verdict in verdicts)}
        print(f"({name}: {time.perf_counter() - start:.0f} s)", flush=True)
        if path:
            path.write_text(json.dumps(results, indent=1))
    print("\n" + "\n".join(shown(verdict) for verdict in verdicts))
    return results


def arguments() -> argparse.Namespace:
    """The command line's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="write the numbers there, too")
    parser.add_argument("--sections", nargs="+", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--tune", action="store_true", help="time the Triton log-probs in other tilings, besides")
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    options = parser.parse_args()
    if not options.dry_run and not torch.cuda.is_available():
        parser.error("no GPU: torch.cuda.is_available() is False; --dry-run tries the script out on the CPU")
    return options


if __name__ == "__main__":
    given = arguments()
    done = main(TINY if given.dry_run else FULL, given.sections, given.tune, given.json)
    sys.exit(any("error" in verdict or not (verdict["passed"] or given.dry_run) for verdict in done["verdicts"]))
