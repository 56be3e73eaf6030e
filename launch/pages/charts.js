"use strict";
// Puts uPlot charts in the place of the drawings of curves: charts of one group share a cursor and a zoom.
// megalite.draw(curves) draws a group as launch/pages/curves.py describes it, or replaces its numbers. The reader
// chooses what x counts, where the group has further axes, and a logarithmic axis for what is positive.
const megalite = (() => {
  const drawn = new Map();  // id of a chart -> its uPlot
  const groups = new Map();  // id of a group -> its numbers
  const chosen = new Map();  // id of a group -> {axis: the name of its x axis, log: whether the reader wants logarithms}
  const HEIGHT = 216;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const compact = new Intl.NumberFormat("en", {notation: "compact", maximumSignificantDigits: 6});
  const exact = new Intl.NumberFormat("en", {maximumSignificantDigits: 5});
  const known = (format, value) => value === null || value === undefined ? "" : format.format(value);

  function tickText(tick, isLog) {
    if (tick === null || (isLog && !/^[125]/.test(tick.toExponential(0)))) return "";  // there is room for these alone
    return tick && Math.abs(tick) < 1e-4 ? tick.toExponential() : known(compact, tick);
  }

  const choiceOf = curves => chosen.get(curves.id) ?? {axis: curves.axis, log: false};
  const xOf = curves => curves.axes[choiceOf(curves).axis] ?? curves.x;

  function columnsOf(curves, chart) {
    const passed = values => values.map(value => value === "" ? undefined : value);
    const lines = chart.lines.flatMap(line =>
      line.least ? [line.mean, line.largest, line.least] : [line.mean]);
    return [xOf(curves), ...lines.map(passed)];
  }

  // in a legend: the number at the pointer, or the last one while there is no pointer, as on a phone
  function legendValue(plot, number, place, index) {
    return known(exact, index == null ? plot.data[place].findLast(Number.isFinite) : number);
  }

  // where a mark is on the axis that was chosen: between the points around its place on the group's own axis
  function placeOf(curves, mark) {
    const own = curves.x, shown = xOf(curves);
    const after = own.findIndex(x => x >= mark);
    if (own === shown || !own.length) return mark;
    if (after <= 0) return after < 0 ? shown[shown.length - 1] : shown[0];
    const share = (mark - own[after - 1]) / (own[after] - own[after - 1]);
    return shown[after - 1] + share * (shown[after] - shown[after - 1]);
  }

  function seriesOf(curves, chart) {
    const value = legendValue, series = [{label: choiceOf(curves).axis, value}], bands = [];
    for (const line of chart.lines) {
      const stroke = () => colour(`--p${line.colour}`);
      series.push({label: line.label, stroke, value, width: 1.6, points: {show: line.dots && line.mean.filter(Number.isFinite).length <= 60, size: 7, fill: stroke}});
      if (line.least) {
        const hidden = {stroke, value, width: 0, points: {show: false}};
        series.push({...hidden, label: "largest"}, {...hidden, label: "least"});
        bands.push({series: [series.length - 2, series.length - 1], fill: () => colour(`--p${line.colour}`) + "38"});
      }
    }
    return {series, bands};
  }

  function drawMarks(curves) {
    return plot => {
      const {ctx, bbox} = plot, ratio = devicePixelRatio;
      ctx.save();
      ctx.lineWidth = 1.5 * ratio;
      for (const mark of groups.get(curves.id).marks) {
        const place = placeOf(groups.get(curves.id), mark.x);
        if (place < plot.scales.x.min || place > plot.scales.x.max) continue;
        const x = plot.valToPos(place, "x", true), bottom = bbox.top + bbox.height;
        ctx.strokeStyle = colour(`--mark-${mark.kind}`);
        ctx.beginPath();
        ctx.moveTo(x, bottom - 9 * ratio);
        ctx.lineTo(x, bottom);
        ctx.stroke();
      }
      ctx.restore();
    };
  }

  function create(curves, chart, host) {
    const {series, bands} = seriesOf(curves, chart);
    const axis = {
      stroke: () => colour("--quiet"), grid: {stroke: () => colour("--grid"), width: 1},
      ticks: {stroke: () => colour("--grid"), width: 1},
      values: (_, ticks) => ticks.map(tick => tickText(tick, false)),
    };
    const isDecade = value => Math.abs(Math.log10(value) - Math.round(Math.log10(value))) < 1e-9;
    const decades = (plot, splits) => plot.scales.y.max / plot.scales.y.min < 20
      ? splits : splits.map(split => isDecade(split) ? split : null);
    const values = (_, ticks) => ticks.map(tick => tickText(tick, true));
    const isLog = chart.log || (choiceOf(curves).log && chart.positive);
    const log = isLog ? {filter: decades, values, grid: {...axis.grid, filter: decades}, ticks: {show: false}} : {};
    const size = (_, labels) => 22 + 7 * Math.max(4, ...(labels ?? []).map(text => (text ?? "").length));
    const options = {
      width: host.clientWidth, height: HEIGHT, series, bands,
      scales: {x: {time: false}, y: {distr: isLog ? 3 : 1}},
      axes: [axis, {...axis, ...log, size}],
      cursor: {sync: {key: curves.id, setSeries: false}, points: {size: 6}},
      hooks: {draw: [drawMarks(curves)]},
    };
    const plot = new uPlot(options, columnsOf(curves, chart), host);
    host.classList.add("live");
    new ResizeObserver(() => {
      if (host.clientWidth && host.clientWidth !== plot.width) plot.setSize({width: host.clientWidth, height: HEIGHT});
    }).observe(host);
    drawn.set(chart.id, plot);
  }

  function buttons(curves) {
    const first = document.getElementById(curves.charts[0]?.id), names = [curves.axis, ...Object.keys(curves.axes)];
    if (!first || names.length < 2 || document.getElementById(`axes-${curves.id}`)) return;
    const row = document.createElement("div");
    row.id = `axes-${curves.id}`;
    row.className = "axes";
    const choose = change => {
      chosen.set(curves.id, {...choiceOf(curves), ...change});
      const shown = groups.get(curves.id);
      for (const chart of shown.charts) {
        drawn.get(chart.id)?.destroy();
        drawn.delete(chart.id);
      }
      draw(shown);
      mark();
    };
    const add = (text, change, isOn) => {
      const button = document.createElement("button");
      button.type = "button";
      button.textContent = text;
      button.onclick = () => choose(change());
      row.append(button);
      return () => button.setAttribute("aria-pressed", isOn());
    };
    const marks = names.map(name => add(`by ${name}`, () => ({axis: name}), () => choiceOf(curves).axis === name));
    marks.push(add("logarithmic", () => ({log: !choiceOf(curves).log}), () => choiceOf(curves).log));
    const mark = () => marks.forEach(each => each());
    mark();
    first.closest(".charts").before(row);
  }

  function draw(curves) {
    const isNew = JSON.stringify(groups.get(curves.id)) !== JSON.stringify(curves);
    groups.set(curves.id, curves);
    for (const chart of curves.charts) {
      const host = document.getElementById(chart.id), plot = drawn.get(chart.id);
      const isShown = plot && plot.root.isConnected && plot.series.length === columnsOf(curves, chart).length;
      if (isShown && !isNew) continue;
      if (isShown) {
        const [x] = plot.data, isZoomed = plot.scales.x.min > x[0] || plot.scales.x.max < x[x.length - 1];
        plot.setData(columnsOf(curves, chart), !isZoomed);
        if (isZoomed) plot.redraw();
        plot.setCursor({left: plot.cursor.left, top: plot.cursor.top});
      } else if (host && curves.x.length) {
        if (plot) plot.destroy();
        create(curves, chart, host);
      }
    }
    buttons(curves);
  }

  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
    for (const plot of drawn.values()) plot.redraw(false);
  });
  for (const curves of JSON.parse(document.getElementById("curves-data").textContent)) draw(curves);
  document.documentElement.dataset.charts = drawn.size;
  return {draw};
})();
