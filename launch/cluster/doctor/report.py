"""Tables and sentences of the doctor's report; hosts with the same finding share a row."""

from __future__ import annotations

from launch.cluster.doctor.bandwidth import Links
from launch.cluster.doctor.findings import FAIL, OK, WARN, fold
from launch.cluster.doctor.preflight import PreflightReport
from launch.output import Cell, StyledCell, Table

STYLES = {OK: "green", WARN: "yellow", FAIL: "bold red"}


def table(report: PreflightReport) -> Table:
    """Builds a table of findings and remedies, in the order in which checks depend on each other."""
    rows: list[list[Cell]] = []
    previous = None
    for finding in report.findings:
        style = STYLES[finding.verdict]
        is_of_all = len(finding.hosts) == len(report.hosts) > 1
        rows.append(
            [
                "" if finding.check == previous else finding.check,
                StyledCell(finding.verdict, style),
                f"all {len(report.hosts)}" if is_of_all else fold(finding.hosts) or "-",
                StyledCell(finding.sentence, "" if finding.verdict == OK else style),
                finding.remedy,
            ]
        )
        previous = finding.check
    return Table(("check", "", "hosts", "found", "what to do"), rows, "findings", range(5))


def conclusion(report: PreflightReport) -> str:
    """Summarises the report in one line."""
    count, failed = len(report.hosts), report.failed_hosts
    hosts, warnings = f"{count} host{'s' * (count > 1)}", sum(one.verdict == WARN for one in report.findings)
    suffix = f", {warnings} warning{'s' * (warnings > 1)}" if warnings else ""
    if report.passed:
        return f"{hosts} can train together{suffix} ({report.seconds:.1f} s)"
    if not failed:
        return f"{hosts} can NOT train together as it is{suffix} ({report.seconds:.1f} s)"
    rest = [name for name in report.hosts if name not in failed]
    without = f"; without {'it' if len(failed) == 1 else 'them'}, {fold(rest)} could" if rest else ""
    what = f"{len(failed)} of {hosts} can NOT train: {fold(list(failed))}"
    return f"{what}{without}{suffix} ({report.seconds:.1f} s)"


def links_table(links: Links) -> Table:
    """Builds a table with a row per link, the slow ones marked."""
    rows: list[list[Cell]] = []
    for link in links.links:
        slow = StyledCell("SLOW", STYLES[WARN]) if link.is_outlier else ""
        rows.append([link.source, link.target, f"{link.gigabytes_per_s:.3g}", f"{link.latency_us:.0f}", slow])
    title = f"links, {links.backend}" if links.backend else "links"
    return Table(("from", "to", "GB/s", "latency us", ""), rows, title, text_columns=(0, 1, 4))


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
