// Curves of metrics, drawn by uPlot in the colors of the page.

import uPlot from "./vendor/uplot.js";
import { element, number, select } from "./dom.js";

export const COLORS = ["#0d74ce", "#d9480f", "#218358", "#8e4ec6", "#b26a00", "#c2255c", "#0b7285",
  "#5f6b7a"];

const TRAINING = "rollout/reward_mean";
const EVALUATION = "eval/reward_mean";

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const WHOLE = [1, 2, 5].flatMap((digit) => [1, 10, 100, 1e3, 1e4, 1e5, 1e6].map((by) => digit * by))
  .sort((a, b) => a - b); // distances of ticks on an axis of steps

/** Return the ends of an axis. A constant curve is in the middle. */
const range = (plot, least, most) => (least === most ? [least - 0.5, most + 0.5]
  : uPlot.rangeNum(least ?? 0, most ?? 1, 0.1, true));

/** Return the width of the y axis: its longest label, the tick and a gap. */
const widthOf = (plot, labels) => Math.max(56, 18 + 7 * Math.max(0,
  ...(labels ?? []).map((label) => label.length)));

/** Return a hook that shades a chart from its left edge to x. */
const shadeTo = (x) => (plot) => {
  const { left, top, width, height } = plot.bbox;
  const right = Math.min(plot.valToPos(x, "x", true), left + width);
  if (right <= left) return;
  plot.ctx.save();
  plot.ctx.fillStyle = color("--soft");
  plot.ctx.fillRect(left, top, right - left, height);
  plot.ctx.restore();
};

/**
 * Return a chart of curves `{label, points: [[x, y], ...], color}`. It has the width of its parent,
 * also after that changes. All charts of one `sync` show the same cursor. The part up to `warmup` is
 * shaded.
 */
export function chart(title, axis, curves, { sync = null, height = 190, warmup = null } = {}) {
  const box = element("figure", { class: "chart" }, element("figcaption", {}, title,
    warmup !== null && element("span", { class: "dim" }, " (shaded: warm-up)")));
  const xs = [...new Set(curves.flatMap((curve) => curve.points.map(([x]) => x)))];
  xs.sort((a, b) => a - b);
  const columns = curves.map((curve) => {
    const found = new Map(curve.points);
    return xs.map((x) => (found.has(x) ? found.get(x) : undefined));
  });
  const line = { stroke: color("--dim"), grid: { stroke: color("--line"), width: 1 },
    ticks: { stroke: color("--line"), width: 1 } };
  const format = (plot, value) => number(value ?? null, 4);
  const first = xs[0] ?? 0;
  const ticks = (plot, values) => values.map((value) => number(value, 6));
  const options = {
    width: 300,
    height,
    scales: { x: { time: false, ...(xs.length === 1 ? { range: [first - 1, first + 1] } : {}) },
      y: { range } },
    axes: [{ ...line, label: axis, labelSize: 18, size: 34,
      ...(axis === "steps" ? { incrs: WHOLE } : {}) }, { ...line, size: widthOf, values: ticks }],
    cursor: sync ? { sync: { key: sync } } : {},
    legend: { live: true, show: true },
    hooks: { drawClear: warmup === null ? [] : [shadeTo(warmup)] },
    series: [{ label: axis, value: format }, ...curves.map((curve) => ({
      label: curve.label,
      stroke: curve.color,
      width: 1.5,
      spanGaps: true,
      points: { show: curve.points.length < 60, size: 5 },
      value: format,
    }))],
  };
  if (!xs.length) {
    box.append(element("p", { class: "dim" }, "no values yet"));
    return box;
  }
  const plot = new uPlot(options, [xs, ...columns], box);
  const observer = new ResizeObserver(() => {
    if (!box.isConnected) return;
    plot.setSize({ width: Math.max(box.clientWidth - 2, 120), height });
  });
  observer.observe(box);
  box.destroy = () => {
    observer.disconnect();
    plot.destroy();
  };
  return box;
}

/** Free the charts in an element. */
export function destroyCharts(parent) {
  for (const box of parent.querySelectorAll("figure.chart")) box.destroy?.();
}

/** Return [x, y] pairs of a metric, without the rows that lack it. */
export function points(answer, axis, name) {
  const xs = answer[axis];
  return (answer.columns[name] ?? [])
    .map((value, index) => [xs[index], value])
    .filter(([, value]) => value !== null);
}

/** Return curves `{run, color, answer}` of runs `{run, color}` whose metrics can be read. */
export async function curvesOf(context, runs) {
  const found = await Promise.all(runs.map(({ run }) => context.get(`runs/${run.key}/metrics`,
    { names: `${TRAINING},${EVALUATION}` }).catch(() => null)));
  return runs.map((run, index) => ({ ...run, answer: found[index] }))
    .filter((curve) => curve.answer);
}

/** Return the charts of the rewards on one axis, which `onAxis` changes. */
export function rewardCharts(curves, axis, onAxis) {
  const of = (metric) => curves.map((curve) => ({ label: curve.run.name, color: curve.color,
    points: points(curve.answer, axis, metric) })).filter((curve) => curve.points.length);
  const options = ["steps", "samples", "minutes"].map((name) => [name, name]);
  return [select("axis", options, axis, onAxis),
    element("div", { class: "charts" },
      chart("reward of training rollouts", axis, of(TRAINING), { sync: "runs" }),
      chart("greedy reward on dev tasks", axis, of(EVALUATION), { sync: "runs" }))];
}
