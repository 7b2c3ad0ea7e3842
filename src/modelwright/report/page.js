"use strict";
(() => {
  const add = (parent, tag, name, text) => {
    const node = parent.appendChild(document.createElement(tag));
    if (name) node.className = name;
    if (text !== undefined) node.textContent = text;
    return node;
  };
  const tip = add(document.body, "div", "tip"), cursor = add(document.body, "div", "cursor");
  const hide = () => { tip.hidden = cursor.hidden = true; };
  hide();
  const nearest = (points, x) => {
    let low = 0, high = points.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (points[middle][0] <= x) low = middle; else high = middle;
    }
    return x - points[low][0] <= points[high][0] - x ? points[low] : points[high];
  };
  const charts = new WeakMap();
  const read = (svg) => {
    if (!charts.has(svg)) charts.set(svg, JSON.parse(svg.dataset.lines));
    return charts.get(svg);
  };
  // The values at a step; one that was measured at another step says at which.
  const show = (svg, x) => {
    const [left, right, lines] = read(svg), step = nearest(lines[0][2], x)[0], box = svg.getBoundingClientRect();
    tip.replaceChildren();
    add(tip, "b", "", `step ${step.toLocaleString("en")}`);
    for (const [name, color, points] of lines) {
      const [at, value] = nearest(points, step), row = add(tip, "div");
      add(row, "i", `c${color}`);
      add(row, "span", "", name || svg.closest("figure").querySelector(".title").textContent);
      add(row, "em", "", `${+value.toPrecision(4)}` + (at === step ? "" : ` (step ${at.toLocaleString("en")})`));
    }
    tip.hidden = cursor.hidden = false;
    const place = box.left + box.width * (step - left) / ((right - left) || 1), width = tip.offsetWidth;
    Object.assign(cursor.style, {left: `${place}px`, top: `${box.top}px`, height: `${box.height}px`});
    const beside = place + 14 + width < window.innerWidth ? place + 14 : place - 14 - width;
    tip.style.left = `${Math.max(8, Math.min(beside, window.innerWidth - width - 8))}px`;
    tip.style.top = `${Math.max(8, box.top + 8)}px`;
  };
  const chart = (target) => target.closest ? target.closest("svg[data-lines]") : null;
  document.addEventListener("pointermove", (event) => {
    const svg = chart(event.target);
    if (!svg) return hide();
    const [left, right] = read(svg), box = svg.getBoundingClientRect();
    show(svg, left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)));
  });
  addEventListener("scroll", hide, {passive: true});
  // A chart that has the focus is read point by point: arrow keys, Home and End.
  document.addEventListener("keydown", (event) => {
    const svg = chart(event.target);
    if (event.key === "Escape") hide();
    if (!svg || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const points = read(svg)[2][0][2], last = points.length - 1, at = svg.dataset.index;
    const moved = {ArrowLeft: at === undefined ? last : +at - 1, ArrowRight: at === undefined ? 0 : +at + 1, Home: 0, End: last};
    svg.dataset.index = Math.max(0, Math.min(last, moved[event.key]));
    show(svg, points[svg.dataset.index][0]);
  });
  document.addEventListener("focusout", (event) => { if (chart(event.target)) hide(); });
  document.addEventListener("click", (event) => {
    const button = event.target.closest ? event.target.closest("button.csv") : null;
    if (!button) return;
    const figure = button.closest("figure"), title = figure.querySelector(".title").textContent;
    const [, , lines] = read(figure.querySelector("svg[data-lines]"));
    const steps = [...new Set(lines.flatMap(([, , points]) => points.map(([step]) => step)))].sort((a, b) => a - b);
    const columns = lines.map(([, , points]) => new Map(points));
    const cell = (text) => `"${String(text).replaceAll('"', '""')}"`;
    const rows = [["step", ...lines.map(([name]) => cell(name || title))], ...steps.map((step) => [step, ...columns.map((each) => each.get(step) ?? "")])];
    const link = document.createElement("a");
    link.href = URL.createObjectURL(new Blob([rows.join("\n") + "\n"], {type: "text/csv"}));
    link.download = `${title.toLowerCase().replaceAll(/[^a-z0-9]+/g, "-")}.csv`;
    link.click();
    URL.revokeObjectURL(link.href);
  });
})();
