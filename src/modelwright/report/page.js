"use strict";
(() => {
  const tip = document.body.appendChild(document.createElement("div"));
  tip.className = "tip";
  tip.hidden = true;
  const nearest = (points, x) => points.reduce((best, point) => Math.abs(point[0] - x) < Math.abs(best[0] - x) ? point : best);
  document.addEventListener("pointermove", (event) => {
    const svg = event.target.closest ? event.target.closest("svg[data-lines]") : null;
    tip.hidden = !svg;
    if (!svg) return;
    const [left, right, lines] = JSON.parse(svg.dataset.lines);
    const box = svg.getBoundingClientRect();
    const x = left + (right - left) * Math.min(1, Math.max(0, (event.clientX - box.left) / box.width));
    const step = nearest(lines[0][2], x)[0];
    tip.textContent = `step ${step}: ` + lines.map(([name, , points]) => {
      const [at, value] = nearest(points, step);
      return `${name} ${+value.toPrecision(4)}`.trim() + (at === step ? "" : ` (step ${at})`);
    }).join(", ");
    tip.style.top = `${box.top - 26}px`;
    tip.style.left = `${Math.min(event.clientX, window.innerWidth - tip.offsetWidth - 8)}px`;
  });
})();
