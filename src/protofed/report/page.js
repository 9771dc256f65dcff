"use strict";
(() => {
  const SVG = "http://www.w3.org/2000/svg";
  const DASHES = ["", "7 3", "2 3", "10 3 2 3", "5 5", "1 4", "12 4", "6 2 2 2 2 2"];
  const MARKS = [
    (r) => `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`,
    (r) => `M${-r},${-r}h${2 * r}v${2 * r}h${-2 * r}z`,
    (r) => `M0,${-1.2 * r}L${1.15 * r},${0.9 * r}H${-1.15 * r}z`,
    (r) => `M0,${-1.35 * r}L${1.35 * r},0L0,${1.35 * r}L${-1.35 * r},0z`,
    (r) => `M0,${1.2 * r}L${1.15 * r},${-0.9 * r}H${-1.15 * r}z`,
    (r) => `M${-1.2 * r},${-0.45 * r}h${0.75 * r}v${-0.75 * r}h${0.9 * r}v${0.75 * r}h${0.75 * r}v${0.9 * r}h${-0.75 * r}v${0.75 * r}h${-0.9 * r}v${-0.75 * r}h${-0.75 * r}z`,
    (r) => `M${-r},${-0.55 * r}L0,${-1.2 * r}L${r},${-0.55 * r}V${0.55 * r}L0,${1.2 * r}L${-r},${0.55 * r}z`,
    (r) => `M${-1.3 * r},${-0.7 * r}h${2.6 * r}v${1.4 * r}h${-2.6 * r}z`,
  ];
  let data = JSON.parse(document.getElementById("data").textContent);
  const chosen = {}; // the measure shown in each group

  // What is switched off and the theme live in the address, so that a link shows what its sender saw.
  const state = { off: new Set(), theme: null };
  const readState = () => {
    const words = new URLSearchParams(location.hash.slice(1));
    const known = words.has("off") || words.has("theme");
    const off = words.has("off") ? words.get("off").split("|") : data.methods.filter((m) => !m.on).map((m) => m.name);
    state.off = new Set(off);
    state.theme = words.get("theme");
    return known;
  };
  const writeState = () => {
    const words = new URLSearchParams({ off: [...state.off].join("|") });
    if (state.theme) words.set("theme", state.theme);
    history.replaceState(null, "", `#${words}`);
  };

  const style = (index) => {
    const turn = Math.floor(index / 8);
    return { color: `var(--m${index % 8})`, dash: DASHES[(index + turn) % 8], mark: MARKS[(index + turn) % 8] };
  };
  const shown = (index) => !state.off.has(data.methods[index].name);
  const node = (name, attributes = {}, ...children) => {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, value);
    made.append(...children);
    return made;
  };
  const percent = (value) => `${(100 * value).toFixed(2)} %`;
  const bytes = (value) => {
    for (const unit of ["B", "kB", "MB", "GB"]) {
      if (value < 1000 || unit === "GB") return `${trim(+value.toFixed(unit === "B" || value >= 100 ? 0 : 1))} ${unit}`;
      value /= 1000;
    }
  };
  const ticks = (low, high, wanted) => {
    const rough = (high - low || 1) / wanted;
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 2.5, 5, 10].map((k) => k * power).find((s) => s >= rough * 0.999);
    const found = [];
    for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(k * step);
    return found;
  };
  const powers = (low, high) => {
    const found = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p++)
      for (const k of high / low > 300 ? [1] : [1, 2, 5]) {
        const value = k * 10 ** p;
        if (value >= low * 0.999 && value <= high * 1.001) found.push(value);
      }
    return found;
  };
  const LEAST_SPAN = 0.05; // of an axis of accuracies: less would make mountains of single images
  const atLeast = (span, low, high) => {
    const more = Math.max(0, span - (high - low)) / 2;
    return [low - more, high + more];
  };
  const trim = (value) => String(+value.toFixed(4));

  const mark = (index, x, y, r, hollow) => {
    const { color, mark: shape } = style(index);
    return node("path", {
      d: shape(r), transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`, fill: hollow ? "var(--paper)" : color, stroke: color,
      "stroke-width": hollow ? 1.6 : 1, class: "mark", "data-method": index,
    });
  };

  // ---- lines: accuracy or loss over rounds or bytes --------------------------------------------------------------
  const lines = (plot, measure, { x: key, label, log, format }) => {
    const drawn = Object.entries(measure.series).map(([index, line]) => ({ index: +index, ...line })).filter((l) => shown(l.index));
    const width = plot.clientWidth || 640;
    const height = Math.round(Math.min(420, Math.max(240, width * 0.46)));
    const left = 46, right = 14, top = 10, bottom = 42;
    if (!drawn.length) return empty(plot, "No method is switched on.");
    const xs = drawn.flatMap((l) => l[key]), ys = drawn.flatMap((l) => [...l.low, ...l.high]).concat(measure.chance ?? []);
    let [x0, x1] = [Math.min(...xs), Math.max(...xs)], [y0, y1] = [Math.min(...ys), Math.max(...ys)];
    const spread = log && x0 > 0 && x1 / x0 > 40;
    if (!spread && key === "bytes") x0 = 0;
    if (x0 === x1) { x0 -= 0.5; x1 += 0.5; }
    if (measure.percent) [y0, y1] = atLeast(LEAST_SPAN, y0, y1);
    const room = (y1 - y0 || 0.02) * 0.07;
    y0 = measure.percent ? Math.max(0, y0 - room) : y0 - room;
    y1 = measure.percent ? Math.min(1, y1 + room) : y1 + room;
    const unit = spread ? (v) => Math.log(v) : (v) => v;
    const X = (v) => left + ((unit(v) - unit(x0)) / (unit(x1) - unit(x0))) * (width - left - right);
    const Y = (v) => height - bottom - ((v - y0) / (y1 - y0)) * (height - top - bottom);
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img", tabindex: 0 });
    svg.setAttribute("aria-label", `${measure.label} against ${label}: ${drawn.map((l) => `${data.methods[l.index].name} ends at ${measure.percent ? percent(l.mean.at(-1)) : trim(l.mean.at(-1))}`).join(", ")}. Arrow keys read single points.`);
    for (const value of ticks(y0, y1, 5)) {
      svg.append(node("line", { class: "grid", x1: left, x2: width - right, y1: Y(value), y2: Y(value) }));
      svg.append(node("text", { x: left - 8, y: Y(value) + 4, "text-anchor": "end" }, measure.percent ? trim(100 * value) : trim(value)));
    }
    const marks = spread ? powers(x0, x1) : ticks(x0, x1, Math.max(4, Math.floor(width / 110))).filter((v) => key === "bytes" || Number.isInteger(v));
    for (const value of marks) svg.append(node("text", { x: X(value), y: height - bottom + 18, "text-anchor": "middle" }, format(value)));
    svg.append(node("line", { class: "axis", x1: left, x2: width - right, y1: height - bottom, y2: height - bottom }));
    svg.append(node("text", { x: width - right, y: height - 6, "text-anchor": "end" }, label + (spread ? " (logarithmic)" : "")));
    if (measure.chance !== null) {
      const y = Y(measure.chance);
      svg.append(node("line", { class: "chance", x1: left, x2: width - right, y1: y, y2: y, "stroke-dasharray": "4 4" }));
      // Below the line and at its end, where a run that has learned something is far away.
      svg.append(node("text", { x: width - right, y: y + 13, "text-anchor": "end" }, "chance"));
    }
    const path = (xs, ys) => xs.map((x, k) => `${k ? "L" : "M"}${X(x).toFixed(1)},${Y(ys[k]).toFixed(1)}`).join("");
    for (const line of drawn) {
      const back = path([...line[key]].reverse(), [...line.low].reverse()).replace("M", "L");
      svg.append(node("path", { d: `${path(line[key], line.high)}${back}Z`, fill: style(line.index).color, opacity: 0.13, class: "band" }));
    }
    for (const line of drawn) {
      const { color, dash } = style(line.index);
      svg.append(node("path", { d: path(line[key], line.mean), fill: "none", stroke: color, "stroke-width": 2, "stroke-dasharray": dash, "stroke-linejoin": "round", class: "line", "data-method": line.index }));
      const every = Math.max(1, Math.ceil(line[key].length / 8));
      line[key].forEach((x, k) => {
        if ((line[key].length - 1 - k) % every === 0) svg.append(mark(line.index, X(x), Y(line.mean[k]), 3.4));
      });
    }
    const cursor = node("line", { class: "axis", y1: top, y2: height - bottom, visibility: "hidden" });
    svg.append(cursor);
    const tip = document.createElement("div");
    tip.className = "tip";
    tip.hidden = true;
    const said = document.createElement("div");
    said.className = "hidden-text";
    said.setAttribute("role", "status");
    plot.replaceChildren(svg, tip, said);

    const all = [...new Set(xs)].sort((a, b) => a - b);
    let at = all.length - 1;
    const point = (position) => {
      at = Math.min(all.length - 1, Math.max(0, position));
      const x = all[at];
      cursor.setAttribute("x1", X(x));
      cursor.setAttribute("x2", X(x));
      cursor.setAttribute("visibility", "visible");
      const rows = drawn.map((line) => {
        const near = line[key].reduce((best, value, k) => (Math.abs(value - x) < Math.abs(line[key][best] - x) ? k : best), 0);
        return key === "x" && line[key][near] !== x ? null : { line, k: near };
      }).filter(Boolean).sort((a, b) => b.line.mean[b.k] - a.line.mean[a.k]);
      const show = measure.percent ? percent : (v) => v.toFixed(3);
      const texts = rows.map(({ line, k }) => `${data.methods[line.index].name} ${show(line.mean[k])}${key === "bytes" ? ` at ${bytes(line[key][k])}` : ""}`);
      const title = key === "x" ? `round ${x}` : bytes(x);
      tip.replaceChildren(...[title, ...texts].map((text, k) => {
        const row = document.createElement("div");
        row.append(k ? keyOf(rows[k - 1].line.index) : "", text);
        return row;
      }));
      tip.hidden = false;
      const side = X(x) > width / 2;
      tip.style.left = side ? "" : `${X(x) + 12}px`;
      tip.style.right = side ? `${width - X(x) + 12}px` : "";
      tip.style.top = `${top}px`;
      said.textContent = [title, ...texts].join(", ");
    };
    const leave = () => { tip.hidden = true; cursor.setAttribute("visibility", "hidden"); };
    svg.addEventListener("pointermove", (event) => {
      const x = ((event.clientX - svg.getBoundingClientRect().left) / svg.getBoundingClientRect().width) * width;
      point(all.reduce((best, value, k) => (Math.abs(X(value) - x) < Math.abs(X(all[best]) - x) ? k : best), 0));
    });
    svg.addEventListener("pointerleave", leave);
    svg.addEventListener("blur", leave);
    svg.addEventListener("keydown", (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, Home: -all.length, End: all.length }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      point(tip.hidden ? at : at + step);
    });
  };

  // ---- dots: one row per test set, one mark per method, a line over the seeds -------------------------------------
  const dots = (plot, rows, { zero, label, format }) => {
    const width = plot.clientWidth || 640;
    const methods = [...new Set(rows.flatMap((row) => row.points.map((p) => p.index)))];
    if (!methods.length) return empty(plot, "No method is switched on.");
    const narrow = width < 560, gap = 13;
    const left = narrow ? 10 : 24 + Math.min(220, Math.max(...rows.map((row) => row.name.length)) * 7.4);
    const right = 16, top = 6, bottom = 40;
    const tall = rows.map((row) => Math.max(1, row.points.length) * gap + (narrow ? 34 : 20));
    const height = top + tall.reduce((a, b) => a + b, 0) + bottom;
    const values = rows.flatMap((row) => row.points.flatMap((p) => [p.low, p.high, ...(p.paper === null ? [] : [p.paper])]));
    let [x0, x1] = [Math.min(...values), Math.max(...values)];
    if (zero) { x0 = Math.min(0, x0); x1 = Math.max(0, x1); }
    // Chance is drawn where it does not push everything else together.
    for (const { chance } of rows) if (chance !== null && x0 - chance < x1 - x0) [x0, x1] = [Math.min(x0, chance), Math.max(x1, chance)];
    if (!zero) [x0, x1] = atLeast(LEAST_SPAN, x0, x1);
    const room = (x1 - x0 || 0.02) * 0.05;
    [x0, x1] = [x0 - room, x1 + room];
    if (!zero) [x0, x1] = [Math.max(0, x0), Math.min(1, x1)];
    const X = (v) => left + ((v - x0) / (x1 - x0)) * (width - left - right);
    const svg = node("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" });
    svg.setAttribute("aria-label", rows.map((row) => `${row.name}: ${row.points.map((p) => `${data.methods[p.index].name} ${format(p.mean)}`).join(", ")}`).join(". "));
    for (const value of ticks(x0, x1, Math.max(4, Math.floor(width / 120)))) {
      svg.append(node("line", { class: "grid", x1: X(value), x2: X(value), y1: top, y2: height - bottom }));
      svg.append(node("text", { x: X(value), y: height - bottom + 18, "text-anchor": "middle" }, trim(100 * value).replace("-", "−")));
    }
    if (zero) svg.append(node("line", { class: "axis", x1: X(0), x2: X(0), y1: top, y2: height - bottom }));
    svg.append(node("text", { x: width - right, y: height - 6, "text-anchor": "end" }, label));
    let y = top;
    rows.forEach((row, k) => {
      if (k) svg.append(node("line", { class: "grid", x1: 0, x2: width - right, y1: y, y2: y }));
      const first = y + (narrow ? 28 : 10) + gap / 2;
      if (row.chance !== null && row.chance >= x0 && row.chance <= x1) {
        const line = { class: "chance", x1: X(row.chance), x2: X(row.chance), y1: y + (narrow ? 23 : 2), y2: y + tall[k] - 2, "stroke-dasharray": "4 4" };
        svg.append(node("line", line, node("title", {}, `chance: ${format(row.chance)}`)));
      }
      const middle = y + tall[k] / 2;
      svg.append(node("text", { class: "row", x: narrow ? 2 : left - 12, y: narrow ? y + 17 : middle + 4, "text-anchor": narrow ? "start" : "end" }, row.name));
      row.points.forEach((p, j) => {
        const at = first + j * gap;
        const { color } = style(p.index);
        const group = node("g", { "data-method": p.index });
        group.append(node("title", {}, `${data.methods[p.index].name}: ${format(p.mean)}${p.paper === null ? "" : `, paper ${format(p.paper)}`}`));
        if (p.high > p.low) group.append(node("line", { x1: X(p.low), x2: X(p.high), y1: at, y2: at, stroke: color, "stroke-width": 2, opacity: 0.55 }));
        if (p.paper !== null) group.append(mark(p.index, X(p.paper), at, 4, true));
        group.append(mark(p.index, X(p.mean), at, 4));
        svg.append(group);
      });
      y += tall[k];
    });
    plot.replaceChildren(svg);
  };

  const empty = (plot, text) => {
    const said = document.createElement("p");
    said.className = "empty";
    said.textContent = text;
    plot.replaceChildren(said);
  };
  const keyOf = (index) => {
    const key = document.createElement("span");
    key.className = "key";
    fill(key, index);
    return key;
  };
  const fill = (key, index) => {
    const { color, dash } = style(index);
    const svg = node("svg", { viewBox: "0 0 30 12", width: 30, height: 12 });
    svg.append(node("line", { x1: 0, x2: 30, y1: 6, y2: 6, stroke: color, "stroke-width": 2, "stroke-dasharray": dash }), mark(index, 15, 6, 3.6));
    key.replaceChildren(svg);
  };

  const charts = {
    curves: (plot, group, id) => {
      const measure = group.measures.find((m) => m.key === chosen[id]) || group.measures[0];
      if (measure) lines(plot, measure, { x: "x", label: "round", log: false, format: String });
    },
    spent: (plot, group) => {
      const measure = group.measures.find((m) => m.percent);
      if (measure) lines(plot, measure, { x: "bytes", label: "sent up and down", log: true, format: bytes });
    },
    dots: (plot, group, _id, number) => {
      const found = group.dots[number];
      const rows = found.rows.map((name, k) => ({
        name,
        chance: found.chance[k],
        points: Object.entries(found.points).filter(([index, values]) => shown(+index) && values[k])
          .map(([index, values]) => ({ index: +index, mean: values[k][0], low: values[k][1], high: values[k][2], paper: values[k][3] })),
      }));
      const papers = rows.some((row) => row.points.some((p) => p.paper !== null));
      dots(plot, rows, { zero: false, label: `accuracy in %${found.chance.some((c) => c !== null) ? "; dashed: chance" : ""}${papers ? "; hollow: the paper" : ""}`, format: percent });
    },
    tests: (plot, group, _id, number) => {
      const rows = Object.entries(group.tests[number].points).filter(([index]) => shown(+index))
        .map(([index, [mean, low, high]]) => ({ name: data.methods[index].name, chance: null, points: [{ index: +index, mean, low, high, paper: null }] }));
      dots(plot, rows, { zero: true, label: "points above the baseline", format: (v) => (100 * v).toFixed(2) });
    },
  };

  const draw = () => {
    for (const plot of document.querySelectorAll("[data-chart]")) {
      const { chart, group, number } = plot.dataset;
      charts[chart](plot, data.groups[group], group, number);
    }
  };
  const apply = () => {
    for (const row of document.querySelectorAll("tr[data-method], li[data-method], .square [data-method]")) row.toggleAttribute("hidden", !shown(+row.dataset.method));
    for (const box of document.querySelectorAll("[data-switch]")) box.checked = shown(+box.dataset.switch);
    if (state.theme) document.documentElement.dataset.theme = state.theme;
    const dark = state.theme ? state.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    const theme = document.getElementById("theme");
    theme.textContent = dark ? "Light" : "Dark";
    theme.setAttribute("aria-pressed", String(dark));
    draw();
  };
  const dress = () => {
    for (const key of document.querySelectorAll("[data-key]")) if (data.methods.length > 1) fill(key, +key.dataset.key);
    for (const select of document.querySelectorAll("[data-measure]")) if (chosen[select.dataset.measure]) select.value = chosen[select.dataset.measure];
    apply();
  };

  document.addEventListener("change", (event) => {
    const { dataset } = event.target;
    if (dataset.switch !== undefined) {
      const { name } = data.methods[dataset.switch];
      event.target.checked ? state.off.delete(name) : state.off.add(name);
      writeState();
      apply();
    } else if (dataset.measure !== undefined) {
      chosen[dataset.measure] = event.target.value;
      draw();
    }
  });
  document.addEventListener("click", (event) => {
    const { target } = event;
    if (target.dataset.all) {
      state.off = new Set(target.dataset.all === "none" ? data.methods.map((m) => m.name) : []);
      writeState();
      apply();
    } else if (target.id === "theme") {
      state.theme = target.getAttribute("aria-pressed") === "true" ? "light" : "dark";
      writeState();
      apply();
    } else if (target.classList.contains("copy")) {
      const text = target.parentElement.querySelector("code");
      getSelection().selectAllChildren(text);
      navigator.clipboard?.writeText(text.textContent).then(() => { target.textContent = "Copied"; }, () => {});
    } else if (target.matches("nav a, a.skip")) {
      // The address holds what is switched off, so sections are gone to without changing it.
      const place = document.querySelector(target.getAttribute("href"));
      event.preventDefault();
      place.scrollIntoView();
      (place.querySelector("h2") || place).focus({ preventScroll: true });
    } else if (target.id === "stop") {
      stop(target);
    }
  });
  addEventListener("hashchange", () => { if (readState()) apply(); });
  let waiting;
  addEventListener("resize", () => { clearTimeout(waiting); waiting = setTimeout(draw, 80); });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", apply);
  addEventListener("beforeprint", draw);

  // ---- a page that follows a run ---------------------------------------------------------------------------------
  const live = document.documentElement.dataset.live;
  const stop = async (button) => {
    button.disabled = true;
    const answer = await fetch("/stop", { method: "POST", headers: { "X-Protofed-Token": live } }).catch(() => null);
    document.getElementById("stopped").textContent = answer?.ok ? " Stopping." : " It could not be stopped.";
  };
  let tagSeen = "";
  const follow = async () => {
    try {
      const answer = await fetch("/", { headers: tagSeen ? { "If-None-Match": tagSeen } : {} });
      if (answer.status === 200) {
        tagSeen = answer.headers.get("ETag") || "";
        const page = new DOMParser().parseFromString(await answer.text(), "text/html");
        const open = [...document.querySelectorAll("details[open] > summary")].map((s) => s.textContent);
        const focused = document.activeElement?.id;
        document.title = page.title;
        for (const place of ["header", "main"]) document.querySelector(place).replaceWith(page.querySelector(place));
        data = JSON.parse(page.getElementById("data").textContent);
        for (const summary of document.querySelectorAll("summary")) summary.parentElement.open = open.includes(summary.textContent);
        if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
        dress();
      }
    } catch { /* the server is gone; what is shown stays */ }
    setTimeout(follow, 1500);
  };

  readState();
  document.documentElement.classList.add("drawn");
  dress();
  if (live !== undefined) setTimeout(follow, 1500);
})();
