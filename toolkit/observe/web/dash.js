"use strict"; // The page of `toolkit dash` and `toolkit report`; toolkit/observe/view.py computes what it shows.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a800"]; // Okabe and Ito
const CIVIDIS = [0x00224e, 0x35456c, 0x666970, 0x948e77, 0xc8b866, 0xfee838].map((rgb) => [rgb >> 16, (rgb >> 8) & 255, rgb & 255]);
const [header, main] = ["header", "main"].map((name) => document.querySelector(name));
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const time = (seconds, more) => new Date(1e3 * seconds).toLocaleString([], { timeStyle: "short", hourCycle: "h23", ...more });
const moment = (seconds) => time(seconds, { dateStyle: "medium", timeStyle: "medium" });
const link = (run) => `?run=${encodeURIComponent(run)}`;
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const has = (value) => value !== null && value !== undefined;

function number(value, unit = "") {
  const [size, shown] = unit === "B" ? [2 ** 30, "GiB"] : unit === "s" && value < 0.1 ? [1e-3, "ms"] : [1, unit];
  if (value && Math.abs(value) < 1e-5) return `${value.toExponential(2)} ${unit}`.trim();
  return has(value) ? value.$float ?? `${compact.format(value / size)} ${shown}`.trim() : "–";
}

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  return seconds < 90 ? `${Math.round(seconds)} s` : minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value); else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function table(titles, rows) {
  const line = (tag, cells) => make("tr", {}, ...cells.map((cell) => make(tag, {}, cell)));
  return make("table", {}, make("thead", {}, line("th", titles)), make("tbody", {}, ...rows.map((row) => line("td", row))));
}

class Chart { // `isStacked`: the series are areas on top of each other
  constructor(title, unit, { isStacked = false, isTime = true } = {}) {
    Object.assign(this, { unit, isStacked, isTime, note: make("span", { class: "dim" }), body: make("div") });
    main.append(this.element = make("section", {}, make("div", { class: "bar" }, make("h2", {}, title), this.note), this.body));
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.body);
  }

  size() { return { width: Math.max(200, this.body.clientWidth), height: 220 }; }

  show(x, lines, note = "") { // lines: [label, values, colour, dash]
    this.element.hidden = !lines.some(([, values]) => values?.some(has));
    if (this.element.hidden) return;
    this.note.textContent = note;
    const sums = x.map(() => 0), drawn = lines.map(([label, raw, colour, dash], index) => ({
      label, raw, dash, colour: colour ?? COLOURS[index % 8], values: this.isStacked ? raw.map((value, at) => (sums[at] += value ?? 0)) : raw,
    }));
    if (this.isStacked) drawn.reverse(); // the largest sum is drawn first
    this.raw = drawn.map((one) => one.raw);
    const data = [x, ...drawn.map((one) => one.values)], key = drawn.map((one) => one.label).join();
    if (key === this.key) return this.plot.setData(data);
    this.plot?.destroy();
    this.key = key;
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const place = (value) => (!has(value) ? "–" : this.isTime ? time(value) : `${value}`);
    this.plot = new uPlot({
      ...this.size(), scales: { x: { time: this.isTime }, y: this.isStacked || this.unit === "B" ? { range: (_, low, high) => [0, 1.05 * high] } : {} },
      axes: [{ ...axis, values: (_, all) => all.map(place) }, { ...axis, size: 68, values: (_, all) => all.map((value) => number(value, this.unit)) }],
      series: [{ label: this.isTime ? "time" : "step", value: (_, value) => place(value) }, ...drawn.map(({ label, colour, dash }, index) => ({
        label, dash, stroke: colour, fill: this.isStacked ? colour : undefined, width: 1.5, spanGaps: !this.isTime, points: { show: (plot, at) => plot.data[at].filter(has).length < 2 },
        value: (_, value, series, at) => number(this.raw[index][at], this.unit),
      }))],
    }, data, this.body);
  }
}

class HeatMap {
  constructor(choose) {
    this.canvas = make("canvas", { class: "heat", tabindex: 0, role: "application", "aria-label": "Ranks by time; arrow keys choose a cell",
      mousemove: (event) => this.point(event), click: (event) => this.point(event), keydown: (event) => this.press(event) });
    [this.low, this.high, this.tip] = [make("span"), make("span"), make("div", { class: "tip", "aria-live": "polite" })];
    this.choice = make("select", { "aria-label": "Metric", change: () => choose(this.choice.value) });
    const scale = make("canvas", { width: 120, height: 12 }), context = scale.getContext("2d");
    for (let at = 0; at < 120; at++) { context.fillStyle = `rgb(${this.colour(at / 119)})`; context.fillRect(at, 0, 1, 12); }
    const bar = make("div", { class: "bar" }, make("h2", {}, "Ranks by time"), this.choice, this.low, scale, this.high);
    main.append(this.element = make("section", { class: "wide" }, bar, this.canvas, this.tip));
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(view, name) {
    this.element.hidden = !name;
    if (!name) return;
    const { cells, low, high } = this.heat = view.heats[name];
    Object.assign(this, { view, cells, unit: /memory/.test(name) ? "B" : "s", columns: view.times.length });
    this.choice.replaceChildren(...view.metrics.map((one) => new Option(one, one, one === name, one === name)));
    this.canvas.style.height = `${Math.max(cells.length, Math.min(480, 22 * cells.length)) + 20}px`;
    [this.low.textContent, this.high.textContent] = [`≤ ${number(low, this.unit)}`, `≥ ${number(high, this.unit)}`];
    this.choose(this.cell);
  }

  colour(share) {
    const at = Math.max(0, Math.min(1, share)) * 5, low = Math.min(4, Math.floor(at));
    return CIVIDIS[low].map((value, part) => Math.round(value + (at - low) * (CIVIDIS[low + 1][part] - value)));
  }

  value(row, column) {
    const code = this.cells[row][column];
    return code < 0 ? null : this.heat.least + (code / 9999) * (this.heat.most - this.heat.least);
  }

  draw() {
    if (!this.view) return;
    const { canvas, cells, columns, heat } = this, context = canvas.getContext("2d"), image = new ImageData(columns, cells.length);
    [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((size) => size * devicePixelRatio);
    context.scale(devicePixelRatio, devicePixelRatio);
    cells.forEach((row, at) => row.forEach((code, column) => {
      const share = (this.value(at, column) - heat.low) / (heat.high - heat.low || 1);
      if (code >= 0) image.data.set([...this.colour(share), 255], 4 * (at * columns + column));
    }));
    const source = new OffscreenCanvas(columns, cells.length), left = this.left = 56;
    source.getContext("2d").putImageData(image, 0, 0);
    const width = this.width = canvas.clientWidth - left - 14, height = this.height = canvas.clientHeight - 20;
    const tall = height / cells.length, wide = width / columns, middle = (row) => Math.max(7, (row + 0.5) * tall);
    Object.assign(context, { imageSmoothingEnabled: false, font: "12px sans-serif", textBaseline: "middle", textAlign: "right", fillStyle: style("--dim") });
    context.drawImage(source, left, 0, width, height);
    for (let row = 0; row < cells.length; row += Math.ceil(14 / tall)) context.fillText(`${row ? "" : "rank "}${row * heat.ranks_per_row}`, left - 6, middle(row));
    context.textAlign = "center";
    for (let at = 55; at < width; at += 110) context.fillText(time(this.view.times[Math.floor(at / wide)]), left + at, height + 11);
    Object.assign(context, { textAlign: "left", fillStyle: style("--bad") });
    for (const rank of this.view.verdicts.flatMap((one) => one.ranks)) context.fillText("◀", left + width + 1, middle(Math.floor(rank / heat.ranks_per_row)));
    for (const [strokeStyle, lineWidth] of this.cell ? [["#000", 4], ["#fff", 2]] : []) {
      Object.assign(context, { strokeStyle, lineWidth });
      context.strokeRect(left + this.cell[1] * wide, this.cell[0] * tall, Math.max(4, wide), Math.max(4, tall));
    }
  }

  point({ offsetX, offsetY }) {
    if (offsetX >= this.left) this.choose([offsetY / this.height * this.cells.length, (offsetX - this.left) / this.width * this.columns]);
  }

  press(event) {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-16, 0], PageDown: [16, 0], Home: [0, -999], End: [0, 999] }[event.key];
    if (!step) return;
    event.preventDefault();
    this.choose((this.cell ?? [0, this.columns]).map((at, part) => at + step[part]));
  }

  choose(cell) {
    this.cell = cell?.map((at, part) => Math.max(0, Math.min([this.cells.length, this.columns][part] - 1, Math.floor(at))));
    this.draw();
    if (!cell) return;
    const [row, column] = this.cell, count = this.heat.ranks_per_row, first = row * count, value = this.value(row, column);
    const all = this.cells.map((_, one) => this.value(one, column)).filter(has).sort((a, b) => a - b);
    const more = Math.round(100 * (value / all[(all.length - 1) >> 1] - 1)), ranks = count > 1 ? `maximum of ranks ${first} to ${first + count - 1}` : `rank ${first}`;
    const beside = value && Number.isFinite(more) ? `, ${Math.abs(more)} % ${more < 0 ? "below" : "above"} the median rank` : "";
    this.tip.textContent = `${ranks} on ${this.view.hosts[first]}, ${moment(this.view.times[column])}, step ${Math.round(this.view.at[column])}: ${number(value, this.unit)}${beside}`;
  }
}

function verdict({ severity, message, change, cost_s_per_hour: cost, is_past: isPast }) {
  const code = make("code", {}, change), button = make("button", { click: async () => {
    getSelection().selectAllChildren(code); // it remains selected if the browser refuses to copy
    await navigator.clipboard?.writeText(change).then(() => { button.textContent = "Copied"; }, () => {});
  } }, "Copy");
  const text = `${message}${cost >= 1 ? `: costs ${duration(cost)} per hour` : ""}`;
  return make("div", { class: `verdict ${severity}` }, make("b", {}, isPast ? `past ${severity}` : severity), make("p", {}, text), make("div", { class: "bar" }, code, button));
}

function showHead(run) {
  const { step, steps, steps_per_s: rate, metrics: { loss, ...own }, ends_in_s: end, walltime_left_s: left, saved_step: saved } = run;
  const facts = [has(step) && `step ${step}${steps ? "" : ","}`, steps && `of ${steps} (${Math.floor(100 * step / steps)} %),`, rate && `${number(rate)} steps/s,`, has(loss) && `loss ${number(loss)},`,
    ...Object.entries(own).slice(0, 3).map(([name, value]) => `${name} ${number(value)},`),
    has(end) && `ends in ${duration(end)},`, has(left) && `walltime ends in ${duration(left)},`, has(saved) && `saved step ${saved},`, `attempt ${run.attempt ?? "–"}`];
  document.title = `${run.job_name} ${run.state}`;
  header.replaceChildren(make("h1", {}, run.job_name), make("span", { class: "dim" }, run.run_id), make("b", { class: run.state, title: run.reason }, run.state),
    make("span", {}, facts.filter(Boolean).join(" ")), ...(embedded ? [] : [make("a", { href: "?" }, "All runs")]));
}

function runPage(choose) { // returns the function that shows a view
  const verdicts = make("section", { class: "wide" }), events = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" });
  main.replaceChildren(verdicts);
  const heat = new HeatMap((name) => { metric = name; choose(name, show); });
  const spread = new Chart("Slowest and median rank", "s"), parts = new Chart("Composition of a step", "s", { isStacked: true });
  const loss = new Chart("Loss", "", { isTime: false }), rate = new Chart("Throughput", ""), memory = new Chart("Memory by node", "B"), own = {};
  const eventList = make("section", {}, make("h2", {}, "Events"), events);
  main.append(eventList);
  const curve = (chart, { step, slope, mean, highest, trend }) => chart.show(step, [["highest", highest, COLOURS[4]], ["mean", mean, COLOURS[0]],
    ["trend", trend, COLOURS[5], [6, 4]]], has(slope) ? `trend: ${number(1000 * slope)} per 1,000 steps` : "");
  let metric, last;
  function show(view = last) {
    last = view;
    metric = view.heats[metric] ? metric : Object.keys(view.heats)[0];
    verdicts.replaceChildren(make("h2", {}, view.verdicts.length || view.problems.length ? "Verdicts" : "No raised verdict"), ...view.verdicts.map(verdict),
      ...view.problems.map((problem) => make("p", { class: "problem" }, problem)));
    heat.show(view, metric);
    const { metric: name, rank, slowest, median } = view.spread;
    spread.show(view.times, [["slowest", slowest, COLOURS[5]], ["median", median, COLOURS[0]]], `${name}; slowest now: rank ${rank?.at(-1)} on ${view.hosts[rank?.at(-1)]}`);
    parts.show(view.times, Object.entries(view.parts), "mean of all ranks");
    curve(loss, view.loss);
    for (const [name, values] of Object.entries(view.own)) curve(own[name] ??= new Chart(name, "", { isTime: false }), values);
    main.append(eventList); // after the charts
    rate.show(view.times, [[view.unit, view.rate, COLOURS[2]]], view.unit);
    memory.show(view.times, Object.entries(view.memory), "resident memory of the ranks");
    events.replaceChildren(table(["time", "kind", "event"], view.events.toReversed().map(([at, ...rest]) => [moment(at), ...rest])));
  }
  return show;
}

function compare(names) {
  main.replaceChildren();
  header.replaceChildren(make("h1", {}, "Comparison"), make("a", { href: "?" }, "All runs"));
  const views = {}, own = {}, loss = new Chart("Loss", "", { isTime: false }), step = new Chart("Time of a step", "s", { isTime: false });
  const draw = (chart, pick) => {
    const known = names.filter((name) => views[name] && pick(views[name])[0]?.length), [x, ...values] = uPlot.join(known.map((name) => pick(views[name])));
    chart.show(x, known.map((name, index) => [name, values[index], COLOURS[5 * names.indexOf(name)]]));
  };
  for (const name of names) listen(link(name), { view: (view) => {
    views[name] = view;
    draw(loss, (one) => [one.loss.step, one.loss.mean]);
    draw(step, (one) => [one.at, one.step_s]);
    for (const metric of Object.keys(view.own)) {
      draw(own[metric] ??= new Chart(metric, "", { isTime: false }), ({ own: { [metric]: curve } }) => [curve?.step, curve?.mean]);
    }
  } });
}

function overview(runs) {
  if (main.querySelector("input:checked")) return; // the user is choosing
  const rows = runs.map(({ run_id: id, job_name: job, state, reason, step, loss, verdicts }) => [
    make("input", { type: "checkbox", name: "run", value: id, "aria-label": `Compare ${id}` }), make("a", { href: link(id) }, id), job,
    make("b", { class: state, title: reason }, state), `${step ?? ""}`, has(loss) ? number(loss) : "", make("span", {}, ...verdicts.map((line) => make("div", {}, line)))]);
  header.replaceChildren(make("h1", {}, "Runs"));
  main.replaceChildren(make("form", { class: "wide" }, table([make("button", {}, "Compare"), "run", "job", "state", "step", "loss", "verdicts"], rows)));
}

function listen(query, actions) {
  const source = new EventSource(`events${query}`), lost = make("b", { class: "problem" });
  const all = { end: () => source.close(), problem: (message) => { lost.textContent = message; header.append(lost); }, ...actions };
  for (const [name, act] of Object.entries(all)) source.addEventListener(name, (event) => { lost.remove(); act(JSON.parse(event.data)); });
  source.addEventListener("error", () => all.problem("no connection to toolkit dash"));
  return source;
}

const embedded = document.getElementById("data"), names = new URLSearchParams(location.search).getAll("run");
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => location.reload());
if (embedded) {
  const { run, view } = JSON.parse(embedded.textContent);
  showHead(run);
  runPage((_, show) => show())(view);
} else if (names.length > 1) compare(names.slice(0, 2));
else if (names.length) {
  let source;
  const start = (metric, view) => {
    source?.close();
    source = listen(`${link(names[0])}&metric=${encodeURIComponent(metric)}`, { run: showHead, view });
  };
  start("", runPage(start));
} else listen("", { overview });
