"""All critics of the toolbox beside the exact values of the quickstart's sums: what each knows, and what it costs.

It needs torch, transformers, tokenizers, safetensors and attrs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path

from credit import jobs
from credit.known import FIRST, KINDS, Found, Job, markdown, prepare, run_job


def main(
    quick: bool = False, seeds: int = 3, workers: int = 2, only: str = "", out: str = "runs/critic_table"
) -> dict[str, dict[int, Found]]:
    """Each critic, or those whose names have `only` in them, with the same seeds.

    Each run, in one of `workers` processes of one thread (1: in this one), is kept below `out` as soon as it is done:
    who is stopped goes on from there with the same call. `quick` is two steps of one seed: that all of it runs.
    """
    seeds, place = 1 if quick else seeds, Path(out)
    todo = [Job(kind, seed, quick) for seed in range(seeds) for kind in KINDS if only in kind]
    if not todo:
        raise SystemExit(f"--only {only}: no critic's name has that; there are {list(KINDS)}")
    list(jobs.each([quick], partial(prepare, directory=place), workers=workers))
    results: dict[str, dict[int, Found]] = {kind: {} for kind in KINDS}
    run = partial(run_job, directory=place)
    for job, fields in jobs.results(todo, run, say=Job.said, workers=workers, directory=place / "runs"):
        results[job.kind][job.seed] = Found(**fields)
        print(f"seed {job.seed}  {job.kind:<30} {results[job.kind][job.seed].seconds:6.2f} s a step", flush=True)
        (place / "critic_table.md").write_text(markdown(results, first=0 if quick else FIRST) + "\n")
    print(f"\n{markdown(results, first=0 if quick else FIRST)}")
    return results


if __name__ == "__main__":
    jobs.command(main)
