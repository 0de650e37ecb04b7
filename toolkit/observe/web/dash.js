"use strict";
// The page of `toolkit dash` and `toolkit report`. It gets what it shows from toolkit/observe/view.py.

const COLOURS = ["#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c8c", "#b8a800"]; // Okabe and Ito
const SCALE = ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"]
  .map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16))); // cividis
const UNITS = { memory: "B", "GPU memory": "B" };
const head = document.getElementById("head"), main = document.getElementById("main");
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (typeof value === "function") element.addEventListener(name, value);
    else element.setAttribute(name, value);
  }
  element.append(...children);
  return element;
}

function number(value, unit = "") {
  if (value === null || value === undefined) return "–";
  if (unit === "s" && value < 0.1) [value, unit] = [1000 * value, "ms"];
  for (const [size, prefix] of unit === "B" ? [[2 ** 30, "Gi"], [2 ** 20, "Mi"]] : [[1e9, "G"], [1e6, "M"], [1e4, "k"]]) {
    if (Math.abs(value) >= (prefix === "k" ? 1e4 : size)) { [value, unit] = [value / (prefix === "k" ? 1e3 : size), prefix + unit]; break; }
  }
  return `${Math.abs(value) < 1000 ? Number(value.toPrecision(3)) : Math.round(value)} ${unit}`.trim();
}

function duration(seconds) {
  if (seconds < 90) return `${Math.round(seconds)} s`;
  const minutes = Math.round(seconds / 60);
  return minutes < 90 ? `${minutes} min` : `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
}

const moment = (seconds) => new Date(1000 * seconds).toLocaleString([], { dateStyle: "short", timeStyle: "medium" });
const clock = (seconds) => new Date(1000 * seconds).toLocaleTimeString([], { timeStyle: "short" });

class Chart {
  // `stacked` series are areas on top of each other; `time` is true if x is a time.
  constructor(title, { unit = "", stacked = false, time = true, log = false } = {}) {
    Object.assign(this, { title, unit, stacked, time, log });
    this.note = make("span", { class: "dim" });
    this.body = make("div");
    this.element = make("section", {}, make("div", { class: "bar" }, make("h2", {}, title), this.note), this.body);
    new ResizeObserver(() => this.plot?.setSize(this.size())).observe(this.body);
  }

  size() { return { width: Math.max(200, this.body.clientWidth), height: 230 }; }

  show(x, series, note = "") {
    this.note.textContent = note;
    this.element.hidden = !series.length || !x.length;
    if (this.element.hidden) return;
    this.last = [x, series, note];
    const raw = series.map((one) => one.values);
    let drawn = raw;
    if (this.stacked) {
      drawn = raw.map((_, count) => x.map((_, at) => raw.slice(0, count + 1).reduce((sum, one) => sum + (one[at] ?? 0), 0)));
    }
    const order = this.stacked ? series.map((_, index) => series.length - 1 - index) : series.map((_, index) => index);
    this.raw = order.map((index) => raw[index]);
    const data = [x, ...order.map((index) => drawn[index])];
    const key = series.map((one) => one.label).join();
    if (this.plot && key === this.key) { this.plot.setData(data); return; }
    this.plot?.destroy();
    this.key = key;
    const axis = { stroke: style("--dim"), grid: { stroke: style("--line"), width: 1 }, ticks: { stroke: style("--line") } };
    this.plot = new uPlot({
      ...this.size(), scales: { x: { time: this.time }, y: { distr: this.log ? 3 : 1, range: this.log ? undefined : this.stacked ? (u, low, high) => [0, high * 1.05] : undefined } },
      cursor: { drag: { x: true, y: false } },
      axes: [axis, { ...axis, size: 70, values: (u, all) => all.map((value) => (value === null ? "" : number(value, this.unit))) }],
      series: [{ label: this.time ? "time" : "step", value: (u, value) => (value === null ? "–" : this.time ? clock(value) : value) },
        ...order.map((index, place) => {
          const colour = series[index].colour ?? COLOURS[index % COLOURS.length];
          return {
            label: series[index].label, stroke: colour, fill: this.stacked ? colour : undefined, width: series[index].width ?? 2,
            dash: series[index].dash, spanGaps: !this.time, points: { show: false },
            value: (u, value, _, at) => (at === null || at === undefined ? "–" : number(this.raw[place][at], this.unit)),
          };
        })],
    }, data, this.body);
  }

  redraw() { this.key = null; if (this.last) this.show(...this.last); }
}

class HeatMap {
  constructor(choose) {
    this.canvas = make("canvas", {
      class: "heat", tabindex: 0, role: "application", "aria-label": "Heat map of ranks by time; arrow keys choose a cell",
      mousemove: (event) => this.point(event), keydown: (event) => this.press(event), focus: () => this.move(0, 0),
    });
    this.tip = make("div", { class: "tip", "aria-live": "polite" });
    this.scale = make("canvas", { width: 120, height: 12, role: "img", "aria-label": "colour scale" });
    this.ends = [make("span"), make("span")];
    this.choice = make("select", { "aria-label": "Metric", change: () => choose(this.choice.value) });
    const scale = make("span", { class: "bar dim" }, this.ends[0], this.scale, this.ends[1]);
    const title = make("h2", {}, "Ranks by time");
    this.element = make("section", { class: "wide" }, make("div", { class: "bar" }, title, this.choice, scale), this.canvas, this.tip);
    new ResizeObserver(() => this.draw()).observe(this.canvas);
  }

  show(view, name) {
    this.element.hidden = !view.heats[name];
    if (this.element.hidden) return;
    const heat = view.heats[name];
    Object.assign(this, { view, name, heat, unit: UNITS[name] ?? "s", columns: view.times.length });
    this.codes = new Uint16Array(Uint8Array.from(atob(heat.cells), (one) => one.charCodeAt(0)).buffer);
    this.choice.replaceChildren(...view.metrics.map((one) => make("option", one === name ? { selected: "" } : {}, one)));
    this.canvas.style.height = `${Math.max(heat.rows, Math.min(480, 22 * heat.rows)) + 20}px`;
    const context = this.scale.getContext("2d");
    for (let at = 0; at < 120; at++) { context.fillStyle = `rgb(${this.colour(at / 119)})`; context.fillRect(at, 0, 1, 12); }
    [heat.low, heat.high].forEach((value, end) => { this.ends[end].textContent = `${end ? "≥" : "≤"} ${number(value, this.unit)}`; });
    this.draw();
    this.move(0, 0);
  }

  colour(share) {
    const at = Math.max(0, Math.min(1, share)) * (SCALE.length - 1), low = Math.min(SCALE.length - 2, Math.floor(at));
    return SCALE[low].map((value, part) => Math.round(value + (at - low) * (SCALE[low + 1][part] - value)));
  }

  value(row, column) {
    const code = this.codes[row * this.columns + column];
    return code ? this.heat.least + ((code - 1) / 65533) * (this.heat.most - this.heat.least) : null;
  }

  draw() {
    if (!this.view) return;
    const { canvas, heat, columns } = this, ratio = devicePixelRatio || 1, left = 56, bottom = 20;
    canvas.width = canvas.clientWidth * ratio;
    canvas.height = canvas.clientHeight * ratio;
    const context = canvas.getContext("2d"), image = new ImageData(columns, heat.rows);
    for (let cell = 0; cell < this.codes.length; cell++) {
      const value = this.value(Math.floor(cell / columns), cell % columns);
      if (value !== null) image.data.set([...this.colour((value - heat.low) / ((heat.high - heat.low) || 1)), 255], 4 * cell);
    }
    const source = new OffscreenCanvas(columns, heat.rows);
    source.getContext("2d").putImageData(image, 0, 0);
    context.scale(ratio, ratio);
    Object.assign(this, { left, width: canvas.clientWidth - left - 14, height: canvas.clientHeight - bottom });
    context.imageSmoothingEnabled = false;
    context.drawImage(source, left, 0, this.width, this.height);
    context.font = "12px system-ui, sans-serif";
    context.textBaseline = "middle";
    context.fillStyle = style("--dim");
    const cell = this.height / heat.rows, every = Math.max(1, Math.ceil(14 / cell));
    context.textAlign = "right";
    for (let row = 0; row < heat.rows; row += every) context.fillText(`${row ? "" : "rank "}${row * heat.ranks_per_row}`, left - 6, (row + 0.5) * cell);
    context.textAlign = "center";
    const labels = Math.max(2, Math.floor(this.width / 110));
    for (let at = 0; at < labels; at++) {
      const column = Math.floor((at + 0.5) * columns / labels);
      context.fillText(clock(this.view.times[column]), left + (column + 0.5) * this.width / columns, this.height + 11);
    }
    context.textAlign = "left";
    context.fillStyle = style("--critical");
    const marked = new Set(this.view.verdicts.flatMap((one) => one.ranks.map((rank) => Math.floor(rank / heat.ranks_per_row))));
    for (const row of marked) context.fillText("◀", left + this.width + 1, (row + 0.5) * cell);
    if (this.cell) {
      const [row, column] = this.cell, wide = Math.max(4, this.width / columns), high = Math.max(4, cell);
      for (const [colour, line] of [["#000", 4], ["#fff", 2]]) {
        context.strokeStyle = colour;
        context.lineWidth = line;
        context.strokeRect(left + (column + 0.5) * this.width / columns - wide / 2, (row + 0.5) * cell - high / 2, wide, high);
      }
    }
  }

  point(event) {
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - this.left) / this.width * this.columns);
    const row = Math.floor((event.clientY - box.top) / this.height * this.heat.rows);
    if (column >= 0 && column < this.columns && row >= 0 && row < this.heat.rows) { this.cell = [row, column]; this.move(0, 0); }
  }

  press(event) {
    const steps = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1], PageUp: [-16, 0], PageDown: [16, 0] };
    const step = steps[event.key] ?? { Home: [0, -this.columns], End: [0, this.columns] }[event.key];
    if (!step) return;
    event.preventDefault();
    this.move(...step);
  }

  move(rows, columns) {
    if (!this.cell && document.activeElement !== this.canvas) return;
    this.cell ??= [0, this.columns - 1];
    const limit = (value, end) => Math.max(0, Math.min(end - 1, value));
    const [row, column] = this.cell = [limit(this.cell[0] + rows, this.heat.rows), limit(this.cell[1] + columns, this.columns)];
    const first = row * this.heat.ranks_per_row, value = this.value(row, column);
    const others = Array.from({ length: this.heat.rows }, (_, one) => this.value(one, column)).filter((one) => one !== null).sort((a, b) => a - b);
    const median = others[Math.floor((others.length - 1) / 2)];
    const beside = value === null || !median ? "" : `, ${Math.round(Math.abs(value / median - 1) * 100)} % ${value < median ? "below" : "above"} the median rank`;
    const ranks = this.heat.ranks_per_row > 1 ? `ranks ${first} to ${first + this.heat.ranks_per_row - 1}, maximum` : `rank ${first} on ${this.view.hosts[first]}`;
    this.tip.textContent = `${ranks}, ${moment(this.view.times[column])}, step ${Math.round(this.view.at[column])}: ${number(value, this.unit)}${beside}`;
    this.draw();
  }
}

function showVerdicts(element, verdicts) {
  element.replaceChildren(make("h2", {}, verdicts.length ? "Verdicts" : "No raised verdict"), ...verdicts.map((one) => {
    const code = make("code", {}, one.change);
    const copy = make("button", { click: async () => {
      try { await navigator.clipboard.writeText(one.change); copy.textContent = "Copied"; } catch { getSelection().selectAllChildren(code); }
    } }, "Copy");
    const cost = one.cost_s_per_hour >= 1 ? ` costs ${duration(one.cost_s_per_hour)} per hour` : "";
    return make("div", { class: `verdict ${one.severity}` }, make("b", {}, one.severity), make("p", {}, `${one.message}${cost && `:${cost}`}`),
      make("div", { class: "bar" }, code, copy));
  }));
}

function showHead(run, note = "") {
  const parts = [
    run.step !== null && `step ${run.step}${run.steps ? ` of ${run.steps} (${Math.floor(100 * run.step / run.steps)} %)` : ""}`,
    run.steps_per_s && `${number(run.steps_per_s)} steps/s`, run.loss !== null && `loss ${number(run.loss)}`,
    run.ends_in_s !== null && `ends in ${duration(run.ends_in_s)}`,
    run.walltime_left_s !== null && `walltime ends in ${duration(run.walltime_left_s)}`,
    run.saved_step !== null && `saved step ${run.saved_step}`, run.attempt && `attempt ${run.attempt}`,
  ].filter(Boolean);
  document.title = `${run.job_name} ${run.state}`;
  head.replaceChildren(make("h1", {}, run.job_name), make("span", { class: "dim" }, run.run_id),
    make("span", { class: `state ${run.state}`, title: run.reason }, run.state), make("span", {}, parts.join(", ")),
    ...(note ? [make("span", { class: "dim" }, note)] : []), ...(EMBEDDED ? [] : [make("a", { href: "?" }, "All runs")]));
}

class RunPage {
  constructor(choose = () => this.show(this.view)) {
    this.verdicts = make("section", { class: "wide", id: "verdicts" });
    this.heat = new HeatMap((name) => { this.metric = name; choose(name); });
    this.charts = {
      spread: new Chart("Slowest and median rank", { unit: "s" }), parts: new Chart("Composition of a step", { unit: "s", stacked: true }),
      loss: new Chart("Loss", { time: false }), rate: new Chart("Throughput"), memory: new Chart("Memory by node", { unit: "B" }),
    };
    this.events = make("tbody");
    const table = make("table", {}, make("thead", {}, make("tr", {}, ...["time", "", "event"].map((one) => make("th", {}, one)))), this.events);
    this.problems = make("section", { class: "wide critical" });
    main.replaceChildren(this.verdicts, this.heat.element, ...Object.values(this.charts).map((one) => one.element),
      make("section", {}, make("h2", {}, "Events"), make("div", { class: "scroll", tabindex: 0, role: "region", "aria-label": "Events" }, table)), this.problems);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => { Object.values(this.charts).forEach((one) => one.redraw()); this.heat.draw(); });
  }

  show(view) {
    this.view = view;
    this.metric = this.metric && view.metrics.includes(this.metric) ? this.metric : Object.keys(view.heats)[0];
    showVerdicts(this.verdicts, view.verdicts);
    this.heat.show(view, this.metric);
    const { spread, parts, loss, rate, memory } = this.charts;
    const last = view.spread.rank?.findLast((rank) => rank >= 0);
    spread.show(view.times, view.ranks < 2 || !view.spread.metric ? [] : [
      { label: "slowest", values: view.spread.slowest, colour: COLOURS[5] }, { label: "median", values: view.spread.median, colour: COLOURS[0] },
    ], last === undefined ? "" : `${view.spread.metric}; slowest now: rank ${last} on ${view.hosts[last]}`);
    parts.show(view.times, Object.entries(view.parts).map(([label, values]) => ({ label, values })), "mean of all ranks");
    loss.show(view.loss.step ?? [], view.loss.step ? [
      { label: "highest", values: view.loss.most, colour: COLOURS[4], width: 1 }, { label: "loss", values: view.loss.loss, colour: COLOURS[0] },
      { label: "trend", values: view.loss.trend, colour: COLOURS[5], dash: [6, 4] },
    ] : [], view.loss.slope === undefined || view.loss.slope === null ? "" : `trend ${number(view.loss.slope)} per 1,000 steps`);
    rate.unit = view.rate.unit;
    rate.show(view.times, [{ label: view.rate.unit, values: view.rate.values, colour: COLOURS[2] }]);
    memory.show(view.times, Object.entries(view.memory).map(([label, values]) => ({ label, values })), "resident memory of its ranks");
    this.events.replaceChildren(...view.events.toReversed().map((one) => make("tr", {}, make("td", {}, moment(one[0])), make("td", {}, one[1]), make("td", {}, one[2]))));
    this.problems.hidden = !view.problems.length;
    this.problems.replaceChildren(...view.problems.map((one) => make("div", {}, one)));
  }
}

function showOverview({ runs }) {
  document.title = "toolkit runs";
  const open = make("button", { disabled: "", click: () => { location.search = boxes().map((box) => `run=${encodeURIComponent(box.value)}`).join("&"); } }, "Compare two runs");
  const boxes = () => [...main.querySelectorAll("input:checked")];
  const chosen = new Set(boxes().map((box) => box.value));
  const check = () => { open.disabled = boxes().length !== 2; };
  const rows = runs.map((run) => make("tr", {},
    make("td", {}, make("input", { type: "checkbox", value: run.run_id, "aria-label": `Choose ${run.run_id}`, change: check, ...(chosen.has(run.run_id) ? { checked: "" } : {}) })),
    make("td", {}, make("a", { href: `?run=${encodeURIComponent(run.run_id)}` }, run.run_id)), make("td", {}, run.job_name),
    make("td", { class: `state ${run.state}`, title: run.reason }, run.state), make("td", {}, `${run.step ?? ""}${run.steps ? ` of ${run.steps}` : ""}`),
    make("td", {}, run.loss === null ? "" : number(run.loss)), make("td", {}, ...run.verdicts.map((line) => make("div", {}, line)))));
  const titles = make("tr", {}, ...["", "run", "job", "state", "step", "loss", "verdicts"].map((one) => make("th", {}, one)));
  head.replaceChildren(make("h1", {}, "Runs"), open);
  main.replaceChildren(make("section", { class: "wide scroll-x" }, make("table", {}, make("thead", {}, titles), make("tbody", {}, ...rows))));
  check();
}

function listen(query, on) {
  const source = new EventSource(`events?${query}`);
  for (const [name, act] of Object.entries(on)) source.addEventListener(name, (event) => act(JSON.parse(event.data)));
  source.addEventListener("end", () => source.close());
  source.addEventListener("error", () => { head.lastChild && (head.dataset.lost = "") ; });
  return source;
}

function compare(names) {
  const charts = { loss: new Chart("Loss", { time: false }), step: new Chart("Time of a step", { time: false, unit: "s" }) };
  head.replaceChildren(make("h1", {}, "Comparison"), make("span", { class: "dim" }, names.join(" and ")), make("a", { href: "?" }, "All runs"));
  main.replaceChildren(...Object.values(charts).map((one) => one.element));
  const views = {};
  const draw = () => {
    for (const [name, pick] of [["loss", (view) => [view.loss.step, view.loss.loss]], ["step", (view) => (view.loss.step ? [view.loss.step, view.loss.seconds] : [view.at, view.step_s])]]) {
      const known = names.filter((one) => views[one] && pick(views[one])[0]);
      if (!known.length) continue;
      const [x, ...values] = uPlot.join(known.map((one) => pick(views[one])));
      charts[name].show(x, known.map((label, index) => ({ label, values: values[index], colour: COLOURS[names.indexOf(label) ? 5 : 0] })));
    }
  };
  for (const name of names) listen(`run=${encodeURIComponent(name)}`, { view: (view) => { views[name] = view; draw(); } });
}

const EMBEDDED = document.getElementById("data");
const names = new URLSearchParams(location.search).getAll("run");
if (EMBEDDED) {
  const { run, view } = JSON.parse(EMBEDDED.textContent);
  showHead(run, `report of ${moment(view.made_s)}`);
  new RunPage().show(view);
} else if (names.length > 1) compare(names.slice(0, 2));
else if (names.length) {
  let source;
  const start = (metric = "") => {
    source?.close();
    source = listen(`run=${encodeURIComponent(names[0])}&metric=${encodeURIComponent(metric)}`, { run: showHead, view: (view) => page.show(view) });
  };
  const page = new RunPage(start);
  start();
} else listen("", { overview: showOverview });
