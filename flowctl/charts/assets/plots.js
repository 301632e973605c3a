/* Draws what the page says with uPlot: each element with `data-plot` has it as JSON (see `flowctl.charts.plots`). */
"use strict";
(() => {
  const short = value => value === 0 ? "0" : Math.abs(value) >= 100
    ? Math.round(value).toLocaleString("en") : String(+value.toPrecision(3));
  const scaled = (steps, value) => {
    const [size, unit] = steps.find(([least]) => Math.abs(value) >= least) || steps[steps.length - 1];
    return `${short(value / size)} ${unit}`;
  };
  const units = {
    count: short,
    share: value => `${short(value * 100)} %`,
    ms: value => scaled([[3.6e6, "h"], [6e4, "min"], [1e3, "s"], [1, "ms"]], value),
    bytes: value => scaled([[2 ** 30, "GiB"], [2 ** 20, "MiB"], [2 ** 10, "KiB"], [1, "B"]], value),
    bits: value => scaled([[1e9, "Gbit/s"], [1e6, "Mbit/s"], [1e3, "kbit/s"], [1, "bit/s"]], value),
    time: value => new Date(value * 1e3).toISOString().slice(0, 19).replace("T", " "),
  };
  const written = (unit, value) => value == null ? "-" : units[unit](value);
  const paint = name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
  const { stepped, bars } = uPlot.paths;

  function series(item) {
    const colour = paint(item.paint);
    return {
      label: item.label,
      scale: item.unit,
      stroke: colour,
      fill: item.as === "area" || item.as === "bars" ? colour : undefined,
      width: item.as === "points" || item.stacked ? 0 : item.as === "bars" ? 1 : 2,
      paths: item.as === "points" ? () => null : item.as === "bars" ? bars({ size: [0.6, 8] })
        : item.as === "line" ? undefined : stepped({ align: 1 }),
      points: { show: item.as === "points", size: 9, fill: colour, stroke: paint("card") },
      spanGaps: true,
      value: (self, shown, place, row) => row == null ? "-" : written(item.unit, item.values[row]),
    };
  }

  function axes(plot) {
    const look = { stroke: paint("muted"), grid: { stroke: paint("grid"), width: 1 }, ticks: { show: false }, font: "12px system-ui" };
    const sides = [...new Set(plot.series.map(item => item.unit))];
    const texts = unit => (self, ticks) => ticks.map(tick => tick == null ? "" : units[unit](tick));
    const at = (tick, step) => new Date(tick * 1e3).toISOString().slice(...step >= 86400 ? [5, 10] : step >= 60 ? [11, 16] : [11, 19]);
    const times = (self, ticks, axis, space, step) => ticks.map(tick => at(tick, step));
    const x = { values: plot.x.unit === "time" ? times : texts(plot.x.unit) };
    return [
      { ...look, ...x, label: plot.x.label, labelFont: look.font, labelSize: 18, size: 26, space: 78 },
      ...sides.map((unit, place) => ({
        ...look, scale: unit, values: texts(unit), side: place ? 1 : 3, size: 66, show: place < 2, space: 28,
        ...(unit === "bytes" ? { incrs: Array.from({ length: 50 }, (_, power) => 2 ** power) } : {}),
        grid: { ...look.grid, show: !place },
      })),
    ];
  }

  /* Lines at values that matter, with their names, and a strip of states below the curves. */
  function marks(plot) {
    return self => {
      const { ctx, bbox } = self, ratio = devicePixelRatio;
      ctx.save();
      ctx.font = `${12 * ratio}px system-ui`;
      for (const [from, until, name] of plot.strip || []) {
        const left = Math.max(self.valToPos(from, "x", true), bbox.left);
        const right = Math.min(self.valToPos(until, "x", true), bbox.left + bbox.width);
        ctx.fillStyle = paint(name);
        if (right > left) ctx.fillRect(left, bbox.top + bbox.height - 5 * ratio, right - left, 5 * ratio);
      }
      for (const { at, scale, label } of plot.marks || []) {
        const place = self.valToPos(at, scale, true);
        const end = scale === "x" ? bbox.left + bbox.width : bbox.top + bbox.height;
        if (!(place >= (scale === "x" ? bbox.left : bbox.top) && place <= end)) continue;
        ctx.strokeStyle = ctx.fillStyle = paint("ink");
        ctx.setLineDash([4 * ratio, 4 * ratio]);
        ctx.beginPath();
        if (scale === "x") {
          ctx.moveTo(place, bbox.top);
          ctx.lineTo(place, bbox.top + bbox.height);
          ctx.textAlign = place > bbox.left + bbox.width / 2 ? "right" : "left";
          ctx.fillText(label, place + (ctx.textAlign === "left" ? 5 : -5) * ratio, bbox.top + bbox.height - 7 * ratio);
        } else {
          ctx.moveTo(bbox.left, place);
          ctx.lineTo(bbox.left + bbox.width, place);
          ctx.textAlign = "left";
          ctx.fillText(label, bbox.left + 5 * ratio, place - 4 * ratio);
        }
        ctx.stroke();
      }
      ctx.restore();
    };
  }

  function draw(place, plot) {
    let rows = plot.series.map(item => item.values), shown = plot.series;
    if (plot.stacked) { // each stands on those before it; the highest is painted first
      let below = plot.x.values.map(() => 0);
      rows = rows.map(values => (below = below.map((low, at) => low + (values[at] || 0)))).reverse();
      shown = [...shown].reverse();
    }
    const scales = { x: { time: plot.x.unit === "time", distr: plot.x.log ? 3 : 1 } };
    for (const { unit } of plot.series) {
      scales[unit] = { range: (self, low, high) => [0, plot.tops?.[unit] || uPlot.rangeNum(0, high || 1, 0.1, true)[1]] };
    }
    place.replaceChildren();
    return new uPlot({
      width: place.clientWidth,
      height: plot.height,
      scales,
      axes: axes(plot),
      tzDate: seconds => uPlot.tzDate(new Date(seconds * 1e3), "Etc/UTC"),
      cursor: { drag: { x: false, y: false }, points: { show: !plot.stacked } },
      series: [
        { label: plot.x.label, value: (self, value) => written(plot.x.unit, value) },
        ...shown.map(series),
      ],
      hooks: { draw: [marks(plot)] },
    }, [plot.x.values, ...rows], place);
  }

  for (const place of document.querySelectorAll("[data-plot]")) {
    const plot = JSON.parse(place.dataset.plot);
    let drawn = null, width = 0;
    const anew = () => {
      drawn?.destroy();
      width = place.clientWidth;
      drawn = width ? draw(place, plot) : null; // what is folded has no width yet
    };
    anew();
    const fit = () => {
      if (place.clientWidth === width) return;
      if (!drawn || !place.clientWidth) return anew();
      width = place.clientWidth;
      drawn.setSize({ width, height: plot.height });
    };
    new ResizeObserver(() => requestAnimationFrame(fit)).observe(place); // not while it observes: that would loop
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", anew);
  }
})();
