"""Compares population-based training with Bayesian and random search, at the same budget.

    python examples/population.py                     # starts its own ranks; 3 seeds
    python examples/population.py --resume            # goes on with that run after a kill
    python examples/population.py --ranks-per-member 2 --methods pbt random --seeds 0

All methods train small GPTs on the same number of sequences and choose the learning rate, the batch
size and the weight decay. They are steered by a validation text; the table shows the loss on a test
text. Everything is in --folder: states of the members, studies of Optuna, results.json, and
population.png.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import multiprocessing
import os
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from population_report import draw, print_table
from population_search import METHODS, search
from population_training import (
    RANGES,
    Outcome,
    Task,
    Team,
    as_score,
    replace,
    train_population,
)
from rich.console import Console
from train_gpt import positive, read_corpus

FOLDER = Path("build/population")
# Imported once for all ranks. The first optimizer imports torch._dynamo.
PRELOAD = ["population_report", "population_search", "scipy.optimize", "sqlalchemy.orm"]
PRELOAD += ["torch._dynamo"]
TIMEOUT = timedelta(minutes=30)  # longer than any trial
SETTINGS = "settings.json"  # in the folder: the options that its results depend on


def run(
    rank: int,
    runs: list[tuple[str, int]],
    scratch: Path,
    args: argparse.Namespace,
) -> None:
    """The main function of one process: does these methods and seeds, one after the other."""
    torch.set_num_threads(1)
    threading.Thread(target=end_with_parent, daemon=True).start()
    store = dist.FileStore(str(scratch / "store"), args.ranks)
    store.set_timeout(TIMEOUT)
    dist.init_process_group("rota", store=store, rank=rank, world_size=args.ranks)
    team = Team(args.ranks_per_member)
    train, validation, test = torch.load(scratch / "text.pt", mmap=True)
    for method, seed in runs:
        task = Task(
            train,
            validation,
            test,
            seed,
            args.rounds,
            args.round_sequences,
            args.trials,
            min(args.trials_at_once, team.num_members),
            args.schedule == "decay",
        )
        name = f"{method}-seed{seed}"
        outcome: Outcome | None
        if method == "pbt":
            outcome = train_population(team, task, args.folder / name)
        else:
            own_store = dist.PrefixStore(name, store)
            outcome = search(method, team, own_store, task, args.folder / name)
        if rank == 0 and outcome is not None:
            save_outcome(outcome_file(args.folder, method, seed), outcome)
            print(
                f"{method} seed {seed}: {outcome.best.test_bits:.3f} bits per byte with "
                f"{outcome.best.hyper}",
                flush=True,
            )
    dist.destroy_process_group()


def end_with_parent() -> None:
    """Ends this rank when the process that started it is killed, since that one may be resumed."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def outcome_file(folder: Path, method: str, seed: int) -> Path:
    return folder / f"{method}-seed{seed}.json"


def save_outcome(path: Path, outcome: Outcome) -> None:
    record = json.dumps(dataclasses.asdict(outcome))
    replace(path, lambda temporary: temporary.write_text(record))


def load_outcome(path: Path) -> Outcome:
    record = json.loads(path.read_text())
    return Outcome(**record | {"best": as_score(record["best"])})


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--ranks", type=positive(int), default=8)
    parser.add_argument("--ranks-per-member", type=positive(int), default=1)
    parser.add_argument("--rounds", type=positive(int), default=20, help="of the population")
    parser.add_argument(
        "--round-sequences",
        type=positive(int),
        default=384,
        help="what a member trains on between two comparisons",
    )
    parser.add_argument(
        "--trials",
        type=positive(int),
        default=8,
        help="of a search; they share its budget, so 8 are as long as 8 members",
    )
    parser.add_argument(
        "--trials-at-once",
        type=positive(int),
        default=2,
        help="at most as many as members; with fewer a search learns more between trials",
    )
    parser.add_argument(
        "--schedule",
        choices=("constant", "decay"),
        default="decay",
        help="of the learning rate, in all methods",
    )
    parser.add_argument(
        "--methods", nargs="+", choices=("pbt", *METHODS), default=["pbt", *METHODS]
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--folder", type=Path, default=FOLDER)
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --folder, if there is one"
    )
    args = parser.parse_args()
    if problem := problem_of(args):
        parser.error(problem)
    return args


def problem_of(args: argparse.Namespace) -> str | None:
    """What is wrong with the options, if anything."""
    per_member, lowest_batch = args.ranks_per_member, RANGES["batch"][0]
    num_members = args.ranks // per_member
    budget = num_members * args.rounds * args.round_sequences
    if per_member > lowest_batch:
        return (
            f"--ranks-per-member is {per_member}, expected at most {lowest_batch}, which is the "
            f"smallest batch"
        )
    if args.ranks % per_member != 0 or num_members < 2:
        return (
            f"--ranks is {args.ranks}, expected a multiple of --ranks-per-member {per_member}, "
            f"and two members or more"
        )
    if args.round_sequences % per_member != 0:
        return (
            f"--round-sequences is {args.round_sequences}, expected a multiple of "
            f"--ranks-per-member {per_member}"
        )
    if budget % (args.trials * per_member) != 0:
        return (
            f"--trials is {args.trials}, expected a divisor of the budget of {budget} sequences "
            f"(members * rounds * sequences of a round)"
            + (f" over {per_member} ranks" if per_member > 1 else "")
        )
    return None


def settings_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options on which an outcome depends, beside its method and seed."""
    others = ("methods", "seeds", "folder", "resume")
    return {name: value for name, value in vars(args).items() if name not in others}


def open_folder(args: argparse.Namespace) -> None:
    """Makes the folder, or checks that its run is one that these options can go on with."""
    path = args.folder / SETTINGS
    if not path.exists():
        args.folder.mkdir(parents=True, exist_ok=True)
        replace(path, lambda temporary: temporary.write_text(json.dumps(settings_of(args))))
        return
    if not args.resume:
        sys.exit(
            f"--folder {args.folder} holds a run; go on with it by --resume, or name another folder"
        )
    saved, given = json.loads(path.read_text()), settings_of(args)
    if saved != given:
        others = [f"--{name.replace('_', '-')} {saved.get(name)}" for name in given]
        sys.exit(
            f"--folder {args.folder} holds a run with other options: expected {' '.join(others)}"
        )


def main() -> None:
    args = parse_args()
    open_folder(args)
    runs = [(method, seed) for seed in args.seeds for method in args.methods]
    missing = [which for which in runs if not outcome_file(args.folder, *which).exists()]
    if missing:
        multiprocessing.set_forkserver_preload(PRELOAD)
        train, held_out = read_corpus()
        with tempfile.TemporaryDirectory(prefix="rota-population-") as name:
            scratch = Path(name)
            torch.save((train, *held_out.chunk(2)), scratch / "text.pt")
            torch.multiprocessing.start_processes(
                run, (missing, scratch, args), args.ranks, start_method="forkserver"
            )
    outcomes = [load_outcome(outcome_file(args.folder, *which)) for which in runs]
    budget = outcomes[0].num_sequences
    subtitle = (
        f"{args.ranks // args.ranks_per_member} members or {args.trials} trials, "
        f"{budget:,} sequences, {args.schedule} learning rate; mean and range over seeds "
        f"{', '.join(map(str, args.seeds))}"
    )
    print_table(outcomes, Console())
    draw(args.folder / "population.png", outcomes, subtitle)
    results = {
        "settings": settings_of(args),
        "outcomes": [dataclasses.asdict(outcome) for outcome in outcomes],
    }
    (args.folder / "results.json").write_text(json.dumps(results) + "\n")
    print(f"picture: {args.folder / 'population.png'}")
    losses = {f"{o.method} seed {o.seed}": round(o.best.test_bits, 4) for o in outcomes}
    print(json.dumps({"held_out_bits": losses, "sequences": budget}))


if __name__ == "__main__":
    main()
