"use strict"; // The page of `toolkit dash` and `toolkit report`; toolkit/observe/view.py computes what it shows.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a800"]; // Okabe and Ito
const SCALE = [0x00224e, 0x35456c, 0x666970, 0x948e77, 0xc8b866, 0xfee838].map((rgb) => [rgb >> 16, (rgb >> 8) & 255, rgb & 255]); // cividis
const [header, main] = ["header", "main"].map((name) => document.querySelector(name));
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name);
const clock = (seconds) => new Date(1e3 * seconds).toLocaleTimeString([], { hour: "2-digit", minute: "2-digit", hourCycle: "h23" });
const moment = (seconds) => new Date(1e3 * seconds).toLocaleString([], { dateStyle: "medium", timeStyle: "medium", hourCycle: "h23" });
const compact = new Intl.NumberFormat("en", { notation: "compact", maximumSignificantDigits: 3 });
const link = (...runs) => `?${runs.map((run) => `run=${encodeURIComponent(run)}`).join("&")}`;

function make(tag, attributes, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes ?? {})) {
    if (typeof value === "function") element.addEventListener(name, value);
    else if (value !== false) element.setAttribute(name, value);
  }
  element.append(...children.filter((child) => child));
  return element;
}

const table = (titles, rows) => make("table", null, make("thead", null, make("tr", null, ...titles.map((title) => make("th", { class: "dim" }, title)))),
  make("tbody", null, ...rows.map((row) => make("tr", null, ...row.map((cell) => make("td", null, cell))))));

function number(value, unit = "") {
  if (value === null || value === undefined) return "–";
  const [size, shown] = unit === "B" ? [2 ** 30, "GiB"] : unit === "s" && value < 0.1 ? [1e-3, "ms"] : [1, unit];
  return `${compact.format(value / size)} ${shown}`.trim();
}

function duration(seconds) {
  const minutes = Math.round(seconds / 60);
  return seconds < 90 ? `${Math.round(seconds)} s` : minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

class Chart { // `isStacked`: the series are areas on top of each other
  constructor(title, { unit = "", isStacked = false, isTime = true } = {}) {
    Object.assign(this, { unit, isStacked, isTime, note: make("span", { class: "dim" }), body: make("div") });
    this.element = make("section", null, make("div", { class: "bar" }, make("h2", null, title), this.note), this.body);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.body);
  }

  size() { return { width: Math.max(200, this.body.clientWidth), height: 220 }; }

  show(x, series, note = "") { // series: [label, values, colour, dash]
    this.element.hidden = !x?.length || !series.some(([, values]) => values?.some((value) => value !== null));
    if (this.element.hidden) return;
    [this.last, this.note.textContent] = [[x, series, note], note];
    const sums = x.map(() => 0);
    let drawn = series.map(([label, values, colour, dash], index) => ({
      label, colour: colour ?? COLOURS[index % 8], dash, raw: values, values: this.isStacked ? values.map((value, at) => (sums[at] += value ?? 0)) : values,
    }));
    if (this.isStacked) drawn = drawn.reverse(); // the largest sum is drawn first
    this.raw = drawn.map((one) => one.raw);
    const data = [x, ...drawn.map((one) => one.values)], key = `${this.unit}${drawn.map((one) => one.label)}`;
    if (key === this.key) { this.plot.setData(data); return; }
    this.plot?.destroy();
    this.key = key;
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    const written = (value) => (value === null ? "–" : this.isTime ? clock(value) : `${value}`);
    this.plot = new uPlot({
      ...this.size(), scales: { x: { time: this.isTime }, y: this.isStacked || this.unit === "B" ? { range: (_, low, high) => [0, 1.05 * high] } : {} },
      axes: [{ ...axis, values: (_, all) => all.map(written) }, { ...axis, size: 68, values: (_, all) => all.map((value) => number(value, this.unit.replace(/.*\/s/, ""))) }],
      series: [{ label: this.isTime ? "time" : "step", value: (_, value) => written(value) }, ...drawn.map(({ label, colour, dash }, place) => ({
        label, dash, stroke: colour, fill: this.isStacked ? colour : undefined, width: 1.5, spanGaps: !this.isTime, points: { show: false },
        value: (_, value, series, at) => number(this.raw[place][at], this.unit),
      }))],
    }, data, this.body);
  }

  redraw() { this.key = null; if (this.last) this.show(...this.last); }
}

class HeatMap {
  constructor(choose) {
    this.canvas = make("canvas", {
      class: "heat", tabindex: 0, role: "application", "aria-label": "Ranks by time; arrow keys choose a cell",
      mousemove: (event) => this.point(event), click: (event) => this.point(event), keydown: (event) => this.press(event),
    });
    Object.assign(this, { tip: make("div", { class: "tip", "aria-live": "polite" }), scale: make("canvas", { width: 120, height: 12 }), ends: [make("span"), make("span")] });
    this.choice = make("select", { "aria-label": "Metric", change: () => choose(this.choice.value) });
    const bar = make("div", { class: "bar" }, make("h2", null, "Ranks by time"), this.choice, this.ends[0], this.scale, this.ends[1]);
    this.element = make("section", { class: "wide" }, bar, this.canvas, this.tip);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(view, name) {
    this.element.hidden = !view.heats[name];
    if (this.element.hidden) return;
    Object.assign(this, { view, heat: view.heats[name], cells: view.heats[name].cells, unit: /memory/.test(name) ? "B" : "s", columns: view.times.length });
    this.choice.replaceChildren(...view.metrics.map((one) => make("option", { selected: one === name }, one)));
    this.canvas.style.height = `${Math.max(this.cells.length, Math.min(480, 22 * this.cells.length)) + 20}px`;
    const context = this.scale.getContext("2d");
    for (let at = 0; at < 120; at++) { context.fillStyle = `rgb(${this.colour(at / 119)})`; context.fillRect(at, 0, 1, 12); }
    [this.heat.low, this.heat.high].forEach((value, end) => { this.ends[end].textContent = `${end ? "≥" : "≤"} ${number(value, this.unit)}`; });
    this.choose(this.cell);
  }

  colour(share) {
    const at = Math.max(0, Math.min(1, share)) * 5, low = Math.min(4, Math.floor(at));
    return SCALE[low].map((value, part) => Math.round(value + (at - low) * (SCALE[low + 1][part] - value)));
  }

  value(row, column) {
    const code = this.cells[row][column], { least, most } = this.heat;
    return code < 0 ? null : least + (code / 9999) * (most - least);
  }

  draw() {
    if (!this.view) return;
    const { canvas, cells, columns, heat } = this, context = canvas.getContext("2d"), image = new ImageData(columns, cells.length);
    [canvas.width, canvas.height] = [canvas.clientWidth, canvas.clientHeight].map((size) => size * devicePixelRatio);
    context.scale(devicePixelRatio, devicePixelRatio);
    cells.forEach((row, place) => row.forEach((code, column) => {
      const share = (this.value(place, column) - heat.low) / (heat.high - heat.low || 1);
      if (code >= 0) image.data.set([...this.colour(share), 255], 4 * (place * columns + column));
    }));
    const source = new OffscreenCanvas(columns, cells.length), left = 56;
    source.getContext("2d").putImageData(image, 0, 0);
    const width = canvas.clientWidth - left - 14, height = canvas.clientHeight - 20, high = height / cells.length, wide = width / columns;
    Object.assign(this, { left, width, height });
    Object.assign(context, { imageSmoothingEnabled: false, font: "12px sans-serif", textBaseline: "middle", textAlign: "right", fillStyle: style("--dim") });
    context.drawImage(source, left, 0, width, height);
    for (let row = 0; row < cells.length; row += Math.ceil(14 / high)) context.fillText(`${row ? "" : "rank "}${row * heat.ranks_per_row}`, left - 6, Math.max(7, (row + 0.5) * high));
    context.textAlign = "center";
    for (let at = 55; at < width; at += 110) context.fillText(clock(this.view.times[Math.floor(at / wide)]), left + at, height + 11);
    Object.assign(context, { textAlign: "left", fillStyle: style("--bad") });
    const marked = new Set(this.view.verdicts.flatMap((one) => one.ranks.map((rank) => Math.floor(rank / heat.ranks_per_row))));
    for (const row of marked) context.fillText("◀", left + width + 1, (row + 0.5) * high);
    if (!this.cell) return;
    for (const [colour, size] of [["#000", 4], ["#fff", 2]]) {
      Object.assign(context, { strokeStyle: colour, lineWidth: size });
      context.strokeRect(left + this.cell[1] * wide, this.cell[0] * high, Math.max(4, wide), Math.max(4, high));
    }
  }

  point(event) {
    const x = event.offsetX - this.left;
    if (x >= 0) this.choose([event.offsetY / this.height * this.cells.length, x / this.width * this.columns]);
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
    const others = this.cells.map((_, one) => this.value(one, column)).filter((one) => one !== null).sort((a, b) => a - b);
    const more = Math.round(100 * (value / others[(others.length - 1) >> 1] - 1));
    const beside = value && Number.isFinite(more) ? `, ${Math.abs(more)} % ${more < 0 ? "below" : "above"} the median rank` : "";
    const ranks = count > 1 ? `maximum of ranks ${first} to ${first + count - 1}` : `rank ${first} on ${this.view.hosts[first]}`;
    this.tip.textContent = `${ranks}, ${moment(this.view.times[column])}, step ${Math.round(this.view.at[column])}: ${number(value, this.unit)}${beside}`;
  }
}

function verdict({ severity, message, change, cost_s_per_hour: cost }) {
  const code = make("code", null, change), copy = async () => {
    getSelection().selectAllChildren(code);
    await navigator.clipboard?.writeText(change).then(() => { button.textContent = "Copied"; }, () => {}); // else it remains selected
  }, button = make("button", { click: copy }, "Copy");
  return make("div", { class: `verdict ${severity}` }, make("b", null, severity),
    make("p", null, `${message}${cost >= 1 ? `: costs ${duration(cost)} per hour` : ""}`), make("div", { class: "bar" }, code, button));
}

function showHead(run) {
  const { step, steps, steps_per_s: rate, loss, ends_in_s: end, walltime_left_s: left, saved_step: saved } = run, isKnown = (value) => value !== null;
  document.title = `${run.job_name} ${run.state}`;
  header.replaceChildren(make("h1", null, run.job_name), make("span", { class: "dim" }, run.run_id), make("b", { class: run.state, title: run.reason }, run.state), make("span", null, [
    isKnown(step) && `step ${step}${steps ? ` of ${steps} (${Math.floor(100 * step / steps)} %)` : ""}`, rate && `${number(rate)} steps/s`,
    isKnown(loss) && `loss ${number(loss)}`, isKnown(end) && `ends in ${duration(end)}`, isKnown(left) && `walltime ends in ${duration(left)}`,
    isKnown(saved) && `saved step ${saved}`, run.attempt && `attempt ${run.attempt}`].filter(Boolean).join(", ")), ...(embedded ? [] : [make("a", { href: "?" }, "All runs")]));
}

function runPage(choose) {
  const verdicts = make("section", { class: "wide" }), events = make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" });
  const heat = new HeatMap((name) => { metric = name; choose(name, show); });
  const [spread, parts, loss, rate, memory] = charts(["Slowest and median rank", { unit: "s" }], ["Composition of a step", { unit: "s", isStacked: true }],
    ["Loss", { isTime: false }], ["Throughput"], ["Memory by node", { unit: "B" }]);
  main.prepend(verdicts, heat.element);
  main.append(make("section", null, make("h2", null, "Events"), events));
  let metric, last;
  function show(view = last) {
    last = view;
    metric = view.heats[metric] ? metric : Object.keys(view.heats)[0];
    verdicts.replaceChildren(make("h2", null, view.verdicts.length ? "Verdicts" : "No raised verdict"), ...view.verdicts.map(verdict),
      ...view.problems.map((problem) => make("p", { class: "problem" }, problem)));
    heat.show(view, metric);
    const { metric: name, rank, slowest, median } = view.spread, now = rank?.at(-1);
    spread.show(view.times, [["slowest", slowest, COLOURS[5]], ["median", median, COLOURS[0]]], `${name}; slowest now: rank ${now} on ${view.hosts[now]}`);
    parts.show(view.times, Object.entries(view.parts), "mean of all ranks");
    const { step, slope, loss: mean, highest, trend } = view.loss;
    loss.show(step, [["highest", highest, COLOURS[4]], ["mean", mean, COLOURS[0]], ["trend", trend, COLOURS[5], [6, 4]]], slope ? `trend: ${number(1000 * slope)} per 1,000 steps` : "");
    rate.unit = view.unit;
    rate.show(view.times, [[view.unit, view.rate, COLOURS[2]]], view.unit);
    memory.show(view.times, Object.entries(view.memory), "resident memory of the ranks");
    events.replaceChildren(table(["time", "kind", "event"], view.events.toReversed().map(([at, ...rest]) => [moment(at), ...rest])));
  }
  return show;
}

function charts(...all) {
  const made = all.map((one) => new Chart(...one));
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => made.forEach((one) => one.redraw()));
  main.replaceChildren(...made.map((one) => one.element));
  return made;
}

function compare(names) {
  const [loss, step] = charts(["Loss", { isTime: false }], ["Time of a step", { isTime: false, unit: "s" }]), views = {};
  header.replaceChildren(make("h1", null, "Comparison"), make("a", { href: "?" }, "All runs"));
  const draw = (chart, pick) => {
    const known = names.filter((name) => views[name] && pick(views[name])[0]), [x, ...values] = uPlot.join(known.map((name) => pick(views[name])));
    chart.show(x, known.map((name, index) => [name, values[index], COLOURS[names.indexOf(name) ? 5 : 0]]));
  };
  for (const name of names) listen(link(name), { view: (view) => {
    views[name] = view;
    draw(loss, ({ loss }) => [loss.step, loss.loss]);
    draw(step, ({ loss, at, step_s: seconds }) => (loss.step ? [loss.step, loss.seconds] : [at, seconds]));
  } });
}

function overview(runs) {
  const boxes = () => [...main.querySelectorAll("input:checked")].map((box) => box.value), checked = boxes();
  const update = () => { button.disabled = boxes().length !== 2; }, button = make("button", { click: () => { location.search = link(...boxes()); } }, "Compare two runs");
  header.replaceChildren(make("h1", null, "Runs"), button);
  main.replaceChildren(make("section", { class: "wide" }, table(["", "run", "job", "state", "step", "loss", "verdicts"], runs.map((run) => [
    make("input", { type: "checkbox", value: run.run_id, "aria-label": `Compare ${run.run_id}`, change: update, checked: checked.includes(run.run_id) }),
    make("a", { href: link(run.run_id) }, run.run_id), run.job_name, make("b", { class: run.state, title: run.reason }, run.state), `${run.step ?? ""}`,
    run.loss === null ? "" : number(run.loss), make("span", null, ...run.verdicts.map((line) => make("div", null, line)))]))));
  update();
}

function listen(query, actions) {
  const source = new EventSource(`events${query}`), lost = make("b", { class: "problem" });
  const all = { end: () => source.close(), problem: (message) => { lost.textContent = message; header.append(lost); }, ...actions };
  for (const [name, act] of Object.entries(all)) source.addEventListener(name, (event) => { lost.remove(); act(JSON.parse(event.data)); });
  source.addEventListener("error", () => all.problem("no connection to toolkit dash"));
  return source;
}

const embedded = document.getElementById("data"), names = new URLSearchParams(location.search).getAll("run");
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
