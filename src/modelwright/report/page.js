"use strict";
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const nearest = (points, x) => points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  const read = (svg) => JSON.parse(svg.dataset.lines);
  const show = (svg, x, lines) => {
    const step = nearest(lines[0][2], x)[0];
    tip.textContent = `step ${step}: ` + lines.map(([name, , points]) => {
      const [at, value] = nearest(points, step);
      return `${name} ${+value.toPrecision(4)}`.trim() + (at === step ? "" : ` (step ${at})`);
    }).join(", ");
    tip.hidden = false;
    return step;
  };
  const place = (box, x) => {
    tip.style.top = `${box.top - 26}px`;
    tip.style.left = `${Math.max(4, Math.min(x, window.innerWidth - tip.offsetWidth - 8))}px`;
  };
  const chart = (target) => target.closest ? target.closest("svg[data-lines]") : null;
  document.addEventListener("pointermove", (event) => {
    const svg = chart(event.target);
    tip.hidden = !svg;
    if (!svg) return;
    const [left, right, lines] = read(svg);
    const box = svg.getBoundingClientRect();
    show(svg, left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width)), lines);
    place(box, event.clientX);
  });
  // A chart that has the focus is read point by point with the arrow keys.
  document.addEventListener("keydown", (event) => {
    const svg = chart(event.target), move = {ArrowLeft: -1, ArrowRight: 1}[event.key];
    if (!svg || !move) return;
    event.preventDefault();
    const [left, right, lines] = read(svg), points = lines[0][2];
    const index = "index" in svg.dataset ? +svg.dataset.index + move : move > 0 ? 0 : points.length - 1;
    svg.dataset.index = Math.max(0, Math.min(points.length - 1, index));
    const step = show(svg, points[svg.dataset.index][0], lines), box = svg.getBoundingClientRect();
    place(box, box.left + box.width * (step - left) / ((right - left) || 1));
  });
  document.addEventListener("focusout", (event) => { if (chart(event.target)) tip.hidden = true; });
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
