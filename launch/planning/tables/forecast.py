"""The length, the price and the checkpoints of a run, in sentences and as JSON. No torch here."""

from __future__ import annotations

from typing import Any

from data_pipeline.storage.paths import decimal_size
from megalite.config import Config
from megalite.planner.failure_rates import PUBLISHED_BAND
from megalite.planner.forecast import RunForecast
from megalite.planner.run_length import DAY_S, hours
from megalite.units import about, duration, percent, short

LOW, HIGH = PUBLISHED_BAND


def forecast_lines(forecast: RunForecast, config: Config, price: float | None, *, rough: bool = False) -> list[str]:
    """Returns the lines for the console. `price`: of an accelerator-hour; `rough`: the step time is a guess."""
    length, scale, rate = forecast.length, forecast.scale, forecast.assumed.rate_per_1000_node_days
    if rough:
        cost = (
            "" if price is None else f", a price of roughly {length.price(price):.1g} at {price:g} per accelerator-hour"
        )
        return [
            f"length: {length.size}: roughly {about(length.training_s)}{cost}",
            checkpoint_line(forecast, config, rough=True),
        ]
    if not length.ends:
        return [
            f"length: {forecast.length_at(1.0)}, without saves and failures",
            f"expected wall time: the run is never done: failures come every {duration(scale.mtbf_hours * 3600)} of "
            f"training, and it saves {format_interval(forecast, config)}",
            checkpoint_line(forecast, config),
        ]
    slow, fast = (forecast.length_at(goodput) for goodput in (scale.goodput_at_high_rate, scale.goodput_at_low_rate))
    training, differs = forecast.length_at(1.0), duration(fast.wall_s) != duration(slow.wall_s)
    lines = [
        f"length: {training}, without saves and failures",
        f"expected wall time: {duration(length.wall_s)}, {hours(length.accelerator_hours)}, with goodput "
        f"{percent(length.goodput)} at {short(rate)} failures per 1,000 node-days"
        + (
            f"; {duration(fast.wall_s)} to {duration(slow.wall_s)} at the published {LOW:g} to {HIGH:g}"
            if differs
            else ""
        ),
    ]
    if price is not None:
        least, most = money(fast.price(price)), money(slow.price(price))
        lines.append(
            f"price: {money(length.price(price))} at {price:g} per accelerator-hour, without storage and network"
            + (f", {least} to {most} at the published failure rates" if least != most else "")
        )
    return [*lines, checkpoint_line(forecast, config)]


def checkpoint_line(forecast: RunForecast, config: Config, *, rough: bool = False) -> str:
    """Returns one sentence about the checkpoints: how often, how large, what a save costs and what is assumed."""
    scale, size, kept = forecast.scale, int(forecast.assumed.checkpoint_bytes), config.checkpoint.keep_last
    cost = (
        f"a save takes {duration(scale.save_duration_s)} in the background and stops training for "
        f"{duration(scale.save_blocked_s)}"
        if config.checkpoint.background
        else f"training waits {duration(scale.save_duration_s)} for a save"
    )
    space = f"{decimal_size(size)} each"
    if config.checkpoint.interval != 0 and not rough:
        space += f", {decimal_size(bytes_per_day(forecast))} a day"
    space += f", {decimal_size(size * kept)} for keep_last {kept}" if kept else ""
    often = format_interval(forecast, config, rough=rough)
    return (
        f"checkpoints: {often}, {space}; {cost}, by the assumed speed of storage "
        "(`megalite plan reliability` takes yours; a run measures its own)"
    )


def bytes_per_day(forecast: RunForecast) -> int:
    """Returns what checkpoints write to storage on a day without failures."""
    scale = forecast.scale
    return int(forecast.assumed.checkpoint_bytes * DAY_S / (scale.interval_s + scale.save_blocked_s))


def format_interval(forecast: RunForecast, config: Config, *, rough: bool = False) -> str:
    """Returns how often the run saves, and which option says so; `rough`: the time of steps is a guess."""
    interval, every = config.checkpoint.interval, duration(forecast.scale.interval_s)
    if interval == 0:
        return "only at the end (checkpoint.interval 0)"
    if interval == "auto":
        return f"every {every} (checkpoint.interval auto)"
    return (
        f"every {interval:,} steps (checkpoint.interval)"
        if rough
        else f"every {every} (checkpoint.interval {interval})"
    )


def forecast_as_json(forecast: RunForecast, config: Config, price: float | None) -> dict[str, Any]:
    """Returns the values for `--json`; infinite where saves never come to an end between failures."""
    length, scale = forecast.length, forecast.scale
    slow, fast = (forecast.length_at(goodput) for goodput in (scale.goodput_at_high_rate, scale.goodput_at_low_rate))
    return {
        "steps": length.steps,
        "tokens": length.tokens,
        "step_s": length.step_s,
        "accelerators": length.accelerators,
        "training_days": length.training_s / DAY_S,
        "training_accelerator_hours": forecast.length_at(1.0).accelerator_hours,
        "goodput": length.goodput,
        "failures_per_1000_node_days": forecast.assumed.rate_per_1000_node_days,
        "expected_days": length.days,
        "expected_days_at_low_rate": fast.days,
        "expected_days_at_high_rate": slow.days,
        "accelerator_hours": length.accelerator_hours,
        "price": None if price is None else length.price(price),
        "checkpoint_interval": config.checkpoint.interval,
        "checkpoint_interval_s": scale.interval_s,
        "checkpoint_bytes": forecast.assumed.checkpoint_bytes,
        "checkpoint_bytes_per_day": bytes_per_day(forecast) if config.checkpoint.interval != 0 else 0,
        "save_blocked_s": scale.save_blocked_s,
        "save_duration_s": scale.save_duration_s,
    }


def money(amount: float) -> str:
    """Formats a price: `10.01 million`, `37,142`, `1.25`; the currency is the user's."""
    if amount >= 1e6:
        return f"{amount / 1e6:,.4g} million"
    return f"{amount:,.0f}" if amount >= 100 else f"{amount:.2f}"
