"""`make demo`: the same mix through `static-fifo`, `passthrough` and the lanes, side by side.

Starts two engines (simulated, or real vLLM on the CPU), and for each scheduler a gateway with both as its pools. Ends
with the comparison and the names of the reports.
"""

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

from serving import spec as spec_file
from serving.workload import experiment

SCHEDULERS = ("static-fifo", "passthrough", "lanes")


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("simulated", "vllm"), default="simulated")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder of the runs; made anew")
    parser.add_argument("--seconds", type=float, default=60.0, help="length of the mix")
    parser.add_argument("--spec", type=Path, default=Path("laneway.yaml"))
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    base = spec_file.load(options.spec)
    if options.out.exists():
        shutil.rmtree(options.out)
    options.out.mkdir(parents=True)
    setup = experiment.Setup(options.engine, pools=2, seconds=options.seconds, out=options.out)
    spec = options.out / "laneway.yaml"
    folders = [options.out / scheduler for scheduler in SCHEDULERS]
    say(f"starting two engines ({options.engine})")
    with experiment.engines(setup) as urls:
        stretch = experiment.measure_stretch(urls[0], base.models[0].name)
        if options.engine == "vllm":
            stretch *= 2  # both share the machine
        if stretch > 1:
            say(f"the engine is {stretch:.1f} times slower than the objectives suit: time is stretched by that")
        experiment.write_spec(base, setup, urls, stretch, spec)
        for scheduler, folder in zip(SCHEDULERS, folders, strict=True):
            say(f"replaying {options.seconds:g} s of short requests behind long ones through {scheduler}")
            experiment.run(setup, spec, stretch, urls, scheduler, folder, options.seed)
    page = options.out / "compare.html"
    say("side by side")
    compare = [sys.executable, "-m", "serving.cli", "compare", *map(str, folders), "--html", str(page)]
    subprocess.run(compare, check=True)
    for folder in folders:
        print(f"report      {folder / 'report.html'}")
    print(f"comparison  {page}")


def say(text: str) -> None:
    """A line of progress."""
    print(f"\n── {text}", flush=True)


if __name__ == "__main__":
    main()
