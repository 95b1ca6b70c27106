"use strict";
// Pointer and keyboard reading of the charts, legends, theme, CSV, and (when served by `bicovg watch`) live updates.
// All text goes into the page through textContent: nothing a run folder says is ever parsed as HTML here.
const SVG = "http://www.w3.org/2000/svg";

function element(kind, parent, text) {
  const made = document.createElement(kind);
  if (text !== undefined) made.textContent = text;
  parent.append(made);
  return made;
}

class Reader {
  constructor(plot) {
    this.plot = plot;
    this.data = JSON.parse(plot.dataset.hover);
    this.svg = plot.querySelector("svg");
    this.place = null;
    plot.addEventListener("pointermove", (event) => this.point(event));
    plot.addEventListener("pointerdown", (event) => this.point(event));
    plot.addEventListener("pointerleave", () => this.hide());
    plot.addEventListener("blur", () => this.hide());
    plot.addEventListener("keydown", (event) => this.key(event));
  }

  get grid() { return this.data.kind === "grid"; }
  get columns() { return this.grid ? (this.data.columns || this.data.rows).length : this.data.x.length; }

  point(event) {
    const box = this.svg.getBoundingClientRect(), view = this.svg.viewBox.baseVal;
    const x = (event.clientX - box.left) / box.width * view.width;
    const y = (event.clientY - box.top) / box.height * view.height;
    const [left, top, width, height] = this.data.box;
    if (!this.grid) {
      let best = 0;
      this.data.at.forEach((at, i) => { if (Math.abs(at - x) < Math.abs(this.data.at[best] - x)) best = i; });
      this.show(best, 0);
    } else if (x >= left && x < left + width && y >= top && y < top + height) {
      this.show(Math.floor((x - left) / width * this.columns), Math.floor((y - top) / height * this.data.rows.length));
    } else {
      this.hide();
    }
  }

  key(event) {
    const [column, row] = this.place || [-1, 0];
    const rows = this.grid ? this.data.rows.length : 1, last = this.columns - 1;
    const moves = {
      ArrowRight: [Math.min(column + 1, last), row], ArrowLeft: [Math.max(column - 1, 0), row],
      Home: [0, row], End: [last, row],
    };
    if (this.grid) {
      moves.ArrowDown = [Math.max(column, 0), Math.min(row + 1, rows - 1)];
      moves.ArrowUp = [Math.max(column, 0), Math.max(row - 1, 0)];
    }
    if (event.key === "Escape") this.hide();
    if (!(event.key in moves) || last < 0) return;
    event.preventDefault();
    this.show(...moves[event.key]);
  }

  show(column, row) {
    this.hide();
    this.place = [column, row];
    const [left, top, width, height] = this.data.box, cursor = document.createElementNS(SVG, "path");
    const at = this.grid ? left + (column + 0.5) * width / this.columns : this.data.at[column];
    if (this.grid) {
      const w = width / this.columns, h = height / this.data.rows.length;
      cursor.setAttribute("d", `M${left + column * w} ${top + row * h}h${w}v${h}h${-w}z`);
      cursor.style.strokeDasharray = "none";
    } else {
      cursor.setAttribute("d", `M${at} ${top}v${height}`);
    }
    cursor.setAttribute("class", "cursor");
    this.svg.append(cursor);
    const tip = element("div", this.plot);
    tip.className = "tip";
    tip.setAttribute("role", "status");
    this.fill(tip, column, row);
    const drawn = this.svg.getBoundingClientRect(), box = this.plot.getBoundingClientRect(), room = tip.offsetWidth;
    const centre = drawn.left - box.left + at / this.svg.viewBox.baseVal.width * drawn.width;
    const edge = centre > box.width / 2 ? centre - room - 12 : centre + 12;
    tip.style.left = `${Math.max(0, Math.min(edge, box.width - room)) + this.plot.scrollLeft}px`;
  }

  fill(tip, column, row) {
    const { data } = this, unit = data.unit;
    if (this.grid) {
      const names = data.columns || data.rows;
      element("strong", tip, `${data.values[row][column]} ${unit}`);
      element("div", tip, `${data.labels[0]}: ${data.rows[row]}`);
      element("div", tip, `${data.labels[1]}: ${names[column]}`);
      return;
    }
    element("strong", tip, `${data.labels[0]} ${data.x[column]}`);
    const rows = element("div", tip);
    const shown = data.series.map((line, i) => [line, i]).filter(([, i]) => !this.hidden(i));
    rows.className = shown.length > 9 ? "rows two" : "rows";
    for (const [line] of shown) {
      if (line.y[column] === null) continue;
      element("span", rows, line.name);
      element("span", rows, `${line.y[column]}${unit && " " + unit}`);
    }
  }

  hidden(series) {
    const mark = this.svg.querySelector(`[data-s="${series}"]`);
    return mark !== null && mark.classList.contains("off");
  }

  hide() {
    this.place = null;
    this.plot.querySelectorAll(".tip, .cursor").forEach((old) => old.remove());
  }

  csv() {
    const quote = (value) => `"${String(value ?? "").replaceAll('"', '""')}"`;
    const { data } = this;
    const lines = this.grid
      ? [["", ...(data.columns || data.rows)], ...data.rows.map((name, i) => [name, ...data.values[i]])]
      : [[data.labels[0], ...data.series.map((line) => line.name)],
        ...data.x.map((x, i) => [x, ...data.series.map((line) => line.y[i])])];
    return lines.map((line) => line.map(quote).join(",")).join("\n") + "\n";
  }
}

function prepareCard(card) {
  const plot = card.querySelector(".plot");
  if (!plot) return;
  const reader = new Reader(plot), marks = (s) => plot.querySelectorAll(`[data-s="${s}"]`);
  for (const button of card.querySelectorAll(".legend button")) {
    const series = button.dataset.legend;
    button.addEventListener("click", () => {
      const on = button.getAttribute("aria-pressed") !== "true";
      button.setAttribute("aria-pressed", String(on));
      marks(series).forEach((mark) => mark.classList.toggle("off", !on));
    });
    const focus = (on) => () => {
      plot.classList.toggle("focus", on);
      marks(series).forEach((mark) => mark.classList.toggle("hot", on));
    };
    for (const event of ["pointerenter", "focus"]) button.addEventListener(event, focus(true));
    for (const event of ["pointerleave", "blur"]) button.addEventListener(event, focus(false));
  }
  card.querySelector(".csv")?.addEventListener("click", () => {
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([reader.csv()], { type: "text/csv" }));
    link.download = `${card.id.replace("card-", "")}.csv`;
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

function prepareTheme() {
  const button = document.getElementById("theme"), names = ["auto", "light", "dark"];
  const apply = (name) => {
    document.documentElement.dataset.theme = name;
    button.textContent = `Theme: ${name}`;
    try { localStorage.setItem("bicovg-theme", name); } catch { /* a page opened from a file may have no storage */ }
  };
  let saved = null;
  try { saved = localStorage.getItem("bicovg-theme"); } catch { /* as above */ }
  apply(names.includes(saved) ? saved : "auto");
  button.addEventListener("click", () => {
    apply(names[(names.indexOf(document.documentElement.dataset.theme) + 1) % names.length]);
  });
}

function preparePrint() {
  let closed = [];
  addEventListener("beforeprint", () => {
    closed = [...document.querySelectorAll("details:not([open])")];
    closed.forEach((details) => { details.open = true; });
  });
  addEventListener("afterprint", () => closed.forEach((details) => { details.open = false; }));
}

function swapCard(old, fresh) {
  const off = [...old.querySelectorAll('.legend [aria-pressed="false"]')].map((button) => button.textContent);
  old.replaceWith(fresh);
  prepareCard(fresh);
  for (const button of fresh.querySelectorAll(".legend button")) if (off.includes(button.textContent)) button.click();
}

function update(html) {
  const next = new DOMParser().parseFromString(html, "text/html");
  const parts = (root) => [...root.querySelectorAll("[data-hash]")];
  const old = parts(document), fresh = parts(next);
  document.title = next.title;
  if (old.map((part) => part.id).join() === fresh.map((part) => part.id).join()) {
    old.forEach((part, i) => { if (part.dataset.hash !== fresh[i].dataset.hash) swapCard(part, fresh[i]); });
    return;
  }
  for (const place of ["header", "main", ".bar .links"]) {
    document.querySelector(place).replaceWith(next.querySelector(place));
  }
  document.querySelectorAll(".card").forEach(prepareCard);
}

function follow(address) {
  const note = document.getElementById("live");
  let tag = null;
  const poll = async () => {
    try {
      const answer = await fetch(address, { headers: tag ? { "If-None-Match": tag } : {}, cache: "no-store" });
      if (answer.status === 200) {
        tag = answer.headers.get("ETag");
        update(await answer.text());
      }
      note.textContent = "live";
      note.className = "";
    } catch {
      note.textContent = "the watch has ended; this is the last state";
      note.className = "off";
    }
    setTimeout(poll, 1000);
  };
  poll();
}

prepareTheme();
preparePrint();
document.querySelectorAll(".card").forEach(prepareCard);
if (document.body.dataset.live) follow(document.body.dataset.live);
