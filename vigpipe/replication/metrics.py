"""Summarize what each replica has counted: its work, and how evenly it was shared."""

from collections.abc import Mapping, Sequence
from statistics import fmean, pstdev
from typing import Any


def balance(loads: Sequence[float]) -> dict[str, float]:
    """Describe how unequal loads are, which are >= 0; equal ones give 0, 1, 1.

    The `cv` is standard deviation over mean, `imbalance` is largest over mean, and `efficiency` is
    mean over largest: the rest is the share of time that replicas would be idle if each waited for
    the largest.
    """
    mean, largest = fmean(loads), max(loads)
    if not largest:
        return {"cv": 0.0, "imbalance": 1.0, "efficiency": 1.0}
    return {"cv": pstdev(loads) / mean, "imbalance": largest / mean, "efficiency": mean / largest}


def summarize_replicas(
    accounts: Sequence[Sequence[dict[str, Any]]], *, has_server: bool = False
) -> dict[str, Any]:
    """Return the entry "replicas" of summary.json.

    It has a table for each replica that is left, the lost ones, and how evenly the others were
    busy. With a pool the items are meant to be unequal, so only the time tells. A server, whose
    ranks are the last ones, has a table of its own.

    The accounts are those of the ranks of each replica (`run.summary.gather_accounts`), first rank
    first; only that one knows more than sent bytes, which are added up, and memory, of which the
    largest is taken. A replica that was lost has none.
    """
    replicas = [
        {"replica": number}
        | ranks[0]
        | {
            "bytes_sent": sum(rank["bytes_sent"] for rank in ranks),
            "peak_bytes": max(rank["peak_bytes"] for rank in ranks),
        }
        for number, ranks in enumerate(accounts)
        if ranks
    ]
    lost = [number for number, ranks in enumerate(accounts) if not ranks]
    server = {"server": replicas.pop()} if has_server else {}
    return {
        "each": replicas,
        **({"lost": lost} if lost else {}),
        **server,
        "items": balance([replica["items"] for replica in replicas]),
        "busy": balance([replica["busy_seconds"] for replica in replicas]),
    }


SERVER = (
    "updates",
    "mean staleness",
    "updates by staleness",
    "worked",
    "waited",
    "exchanged",
    "sent",
    "peak memory",
)
EVENNESS = ("", "CV", "imbalance", "efficiency")


def heads_of_each(samples: str) -> tuple[str, ...]:
    """Return the heads of the table of all replicas; for `samples` see `job.rows.trained_on`."""
    return (
        *("replica", "items", "ms an item", samples, f"{samples}/s", "worked", "waited"),
        *("averaged", "averages", "sent", "peak memory"),
    )


def rows_of_each(replicas: Sequence[Mapping[str, float]]) -> list[list[str]]:
    """Make a row of cells for each table of `summarize_replicas`, under `heads_of_each`.

    The milliseconds of an item are those of full batches, if there are any. Percentages are shares
    of the time that a replica worked, waited or averaged.
    """
    rows = []
    for replica in replicas:
        seconds = accounted_seconds(replica)
        whole = sum(seconds) or 1.0
        rows.append(
            [
                f"{replica['replica']:.0f}",
                f"{replica['items']:.0f}",
                f"{_milliseconds_an_item(replica):,.1f}",
                f"{replica['samples']:,.0f}",
                f"{samples_per_second(replica):,.1f}",
                *(f"{part / whole:.1%}" for part in seconds),
                f"{replica['averages']:.0f}",
                f"{replica['bytes_sent'] / 1e6:,.1f} MB",
                f"{replica['peak_bytes'] / 1e6:,.0f} MB",
            ]
        )
    return rows


def _milliseconds_an_item(replica: Mapping[str, float]) -> float:
    num_items, seconds = replica["items"], replica["busy_seconds"]
    num_partial = replica.get("partial_items", 0)
    if num_partial < num_items:
        num_items -= num_partial
        seconds -= replica.get("partial_busy_seconds", 0.0)
    return 1e3 * seconds / max(1, num_items)


def partial_items(replicas: Sequence[Mapping[str, float]]) -> str:
    """Say how long partial batches took, which the table's milliseconds leave out; or nothing."""
    told: list[str] = []
    for replica in replicas:
        number = replica.get("partial_items", 0)
        if number:
            each = 1e3 * replica["partial_busy_seconds"] / number
            are_all = ", its only ones" if number == replica["items"] else ""
            told.append(
                f"{number:.0f} of replica {replica['replica']:.0f}{are_all} ({each:,.1f} ms each)"
            )
    return f"Items of partial batches are told apart: {'; '.join(told)}." if told else ""


def rows_of_server(server: Mapping[str, Any]) -> list[list[str]]:
    """Make the row of cells about a server, under the heads SERVER."""
    seconds = accounted_seconds(server)
    whole = sum(seconds) or 1.0
    by_staleness = sorted((int(s), count) for s, count in server["staleness"].items())
    num_late = sum(staleness * count for staleness, count in by_staleness)
    return [
        [
            f"{server['updates']:,.0f}",
            f"{num_late / max(1, sum(count for _, count in by_staleness)):.2f}",
            " ".join(f"{staleness}:{count}" for staleness, count in by_staleness),
            *(f"{part / whole:.1%}" for part in seconds),
            f"{server['bytes_sent'] / 1e6:,.1f} MB",
            f"{server['peak_bytes'] / 1e6:,.0f} MB",
        ]
    ]


def samples_per_second(replica: Mapping[str, float]) -> float:
    """Return how many samples a replica has trained on in a second of work, waiting or averages."""
    return replica["samples"] / (sum(accounted_seconds(replica)) or 1.0)


def accounted_seconds(replica: Mapping[str, float]) -> list[float]:
    """Return the seconds that a replica or server has worked, waited and averaged."""
    return [replica[f"{deed}_seconds"] for deed in ("busy", "waiting", "averaging")]


def rows_of_evenness(replicas: Mapping[str, Mapping[str, float]]) -> list[list[str]]:
    """Make rows of cells that say how even items and work were, under the heads EVENNESS."""
    names = {"items": "items", "busy": "seconds of work"}
    measures = ("cv", "imbalance", "efficiency")
    return [[name, *(f"{replicas[k][m]:.3f}" for m in measures)] for k, name in names.items()]
