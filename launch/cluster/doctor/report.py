"""Tables and sentences of the doctor's report; hosts with the same finding share a row."""

from __future__ import annotations

from collections.abc import Sequence

from launch.cluster.doctor.bandwidth import Links
from launch.cluster.doctor.findings import Finding, Severity, fold
from launch.cluster.doctor.preflight import PreflightReport
from launch.output import Cell, StyledCell, Table

STYLES = {Severity.OK: "green", Severity.WARN: "yellow", Severity.FAIL: "bold red"}


def table(report: PreflightReport) -> Table:
    """Builds a table of findings and remedies, in the order in which checks depend on each other."""
    rows: list[list[Cell]] = []
    previous = None
    for finding in report.findings:
        style = STYLES[finding.verdict]
        rows.append(
            [
                "" if finding.check == previous else finding.check,
                StyledCell(finding.verdict, style),
                _hosts_of(finding, report.hosts),
                StyledCell(finding.sentence, "" if finding.verdict == Severity.OK else style),
                finding.remedy,
            ]
        )
        previous = finding.check
    return Table(("check", "", "hosts", "found", "what to do"), rows, "findings", range(5))


def conclusion(report: PreflightReport) -> str:
    """Summarises the report in one line."""
    count, failed = len(report.hosts), report.failed_hosts
    hosts, warnings = f"{count} host{'s' * (count > 1)}", sum(one.verdict == Severity.WARN for one in report.findings)
    suffix = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    if report.passed:
        return f"{hosts} can train together{suffix} ({report.seconds:.1f} s)"
    if not failed:
        return f"{hosts} can NOT train together as it is{suffix} ({report.seconds:.1f} s)"
    rest = [name for name in report.hosts if name not in failed]
    without = f"; without {'it' if len(failed) == 1 else 'them'}, {fold(rest)} could" if rest else ""
    what = f"{len(failed)} of {hosts} can NOT train: {fold(list(failed))}"
    return f"{what}{without}{suffix} ({report.seconds:.1f} s)"


def _hosts_of(finding: Finding, hosts: Sequence[str]) -> str:
    if not finding.hosts:
        return "-"
    if len(finding.hosts) == len(hosts) > 1:
        return f"all {len(hosts)}"
    return fold(finding.hosts)


def links_table(links: Links) -> Table:
    """Builds a table with a row per link, the slow ones marked."""
    slow = StyledCell("SLOW", STYLES[Severity.WARN])
    return Table(
        ("from", "to", "GB/s", "latency us", ""),
        [
            (
                link.source,
                link.target,
                f"{link.gigabytes_per_s:.3g}",
                f"{link.latency_us:.0f}",
                slow if link.is_outlier else "",
            )
            for link in links.links
        ],
        title=f"links, {links.backend}" if links.backend else "links",
        text_columns=(0, 1, 4),
    )


def links_conclusion(links: Links) -> str:
    """Summarises the bandwidth measurement in one line."""
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
