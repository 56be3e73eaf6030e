"""The doctor's report as people read it: a line for each thing that is so on any number of hosts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from launch.doctor.bandwidth import Links
from launch.doctor.findings import Finding, Verdict, fold
from launch.doctor.preflight import Report

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 160  # of a table that goes to a file or a pipe
STYLES = {Verdict.OK: "green", Verdict.WARN: "yellow", Verdict.FAIL: "bold red"}


def table(report: Report) -> Table:
    """Checks in the order in which they depend on each other; what helps stands beside what fails."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title="what the hosts say", title_justify="left")
    for name in ("check", "", "hosts", "found", "what to do"):
        result.add_column(name, no_wrap=name in ("check", ""), overflow="fold")
    previous = None
    for finding in report.findings:
        style = STYLES[finding.verdict]
        plain = "" if finding.verdict == Verdict.OK else style
        result.add_row(
            Text("" if finding.check == previous else finding.check),
            Text(finding.verdict, style=style),
            Text(_where(finding, report.hosts)),
            Text(finding.sentence, style=plain),
            Text(finding.remedy),
        )
        previous = finding.check
    return result


def conclusion(report: Report) -> str:
    """One line."""
    count, failed = len(report.hosts), report.failed_hosts
    hosts, warnings = f"{count} host{'s' * (count > 1)}", sum(one.verdict == Verdict.WARN for one in report.findings)
    beside = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    if report.passed:
        return f"{hosts} can train together{beside} ({report.seconds:.1f} s)"
    if not failed:
        return f"{hosts} can NOT train together as it is{beside} ({report.seconds:.1f} s)"
    rest = [name for name in report.hosts if name not in failed]
    without = f"; without {'it' if len(failed) == 1 else 'them'}, {fold(rest)} could" if rest else ""
    what = f"{len(failed)} of {hosts} can NOT train: {fold(list(failed))}"
    return f"{what}{without}{beside} ({report.seconds:.1f} s)"


def _where(finding: Finding, hosts: Sequence[str]) -> str:
    if not finding.hosts:
        return "-"
    if len(finding.hosts) == len(hosts) > 1:
        return f"all {len(hosts)}"
    return fold(finding.hosts)


def links_table(links: Links) -> Table:
    """A row per link, the slow ones marked."""
    from rich.table import Table
    from rich.text import Text

    result = Table(title=f"links, {links.backend}" if links.backend else "links", title_justify="left")
    result.add_column("from")
    result.add_column("to")
    result.add_column("GB/s", justify="right")
    result.add_column("latency us", justify="right")
    result.add_column("")
    for link in links.links:
        mark = Text("SLOW" if link.is_outlier else "", style=STYLES[Verdict.WARN])
        result.add_row(link.source, link.target, f"{link.gigabytes_per_s:.3g}", f"{link.latency_us:.0f}", mark)
    return result


def links_conclusion(links: Links) -> str:
    """One line."""
    if links.problem is not None:
        return f"links were NOT measured: {links.problem}"
    if not links.links:
        return "one host has no links to measure"
    slow = [f"{link.source} to {link.target}" for link in links.links if link.is_outlier]
    speeds = (
        f"all-reduce of {len(links.hosts)} hosts: {links.all_reduce_gigabytes_per_s:.3g} GB/s, "
        f"{links.all_reduce_latency_us:.0f} us ({links.seconds:.1f} s)"
    )
    return f"{speeds}; slower than half the others: {', '.join(slow)}" if slow else speeds
