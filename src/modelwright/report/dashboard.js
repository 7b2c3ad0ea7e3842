"use strict";
(() => {
  const boxes = (place) => [...place.querySelectorAll("input[name=run]")];
  const pending = {};
  let pressed = false;
  const update = () => {
    for (const [name, part] of Object.entries(pending)) {
      delete pending[name];
      const section = document.getElementById(name);
      if (!section || section.innerHTML === part) continue;
      const open = [...section.querySelectorAll("details")].map((each) => each.open);
      const marked = new Map(boxes(section).map((each) => [each.value, each.checked]));
      section.innerHTML = part;
      section.querySelectorAll("details").forEach((each, index) => { each.open = Boolean(open[index]); });
      for (const each of boxes(section)) if (marked.has(each.value)) each.checked = marked.get(each.value);
    }
    arrange();
  };
  // The list of runs, sorted by a column and filtered by words; applied again after each update.
  const filter = document.getElementById("filter"), order = {column: -1, up: true};
  const arrange = () => {
    const table = document.querySelector("table.runs");
    if (!table || !filter) return;
    const words = filter.value.toLowerCase().split(/\s+/), rows = [...table.tBodies[0].rows];
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    document.getElementById("no-match").hidden = rows.some((row) => !row.hidden);
    table.querySelectorAll("thead th").forEach((head, column) => {
      if (column === order.column) head.setAttribute("aria-sort", order.up ? "ascending" : "descending");
      else head.removeAttribute("aria-sort");
    });
    const button = document.getElementById("compare"), count = boxes(table).filter((each) => each.checked).length;
    if (button) Object.assign(button, {disabled: count < 2, textContent: count < 2 ? "Mark two or more runs to compare" : `Compare ${count} runs`});
    if (order.column < 0) return;
    const key = (row) => row.cells[order.column]?.textContent.trim() ?? "–";
    const missing = (row) => key(row) === "–";
    const compare = (a, b) => missing(a) - missing(b) || (order.up ? 1 : -1) * key(a).localeCompare(key(b), "en", {numeric: true});
    rows.sort(compare);
    table.tBodies[0].append(...rows);
  };
  if (filter) filter.addEventListener("input", arrange);
  document.addEventListener("click", (event) => {
    const button = event.target.closest("button.sort");
    if (!button) return;
    const column = button.closest("th").cellIndex;
    Object.assign(order, {column, up: order.column === column ? !order.up : true});
    arrange();
  });
  document.addEventListener("change", (event) => { if (event.target.name === "run") arrange(); });
  arrange();
  if (document.getElementById("comparison")) return;
  const events = new EventSource("events");
  events.onmessage = (message) => {
    Object.assign(pending, JSON.parse(message.data));
    if (!pressed) update();
  };
  // A link that is replaced while it is pressed gets no click: updates wait until the pointer is released.
  addEventListener("pointerdown", () => { pressed = true; });
  const release = () => setTimeout(() => { pressed = false; update(); });
  addEventListener("pointerup", release);
  addEventListener("pointercancel", release);
  const form = document.getElementById("ask");
  if (!form) return;
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    const errorBox = document.getElementById("ask-error"), replies = document.getElementById("ask-replies");
    const button = form.querySelector("button");
    errorBox.hidden = true;
    replies.hidden = false;
    button.disabled = true;
    replies.querySelectorAll(".answer").forEach((each) => { each.textContent = ""; });
    const show = (value) => {
      if (value.who) replies.querySelector(`[data-who=${value.who}]`).textContent += value.text;
      if (value.error) { errorBox.textContent = value.error; errorBox.hidden = false; }
    };
    try {
      const question = new FormData(form).get("question");
      const answer = await fetch("ask", {method: "POST", headers: {"Content-Type": "application/json"}, body: JSON.stringify({question})});
      if (!answer.ok) throw new Error((await answer.json()).error || answer.statusText);
      const reader = answer.body.pipeThrough(new TextDecoderStream()).getReader();
      for (let rest = ""; ;) {
        const {value, done} = await reader.read();
        if (done) break;
        const lines = (rest + value).split("\n\n");
        rest = lines.pop();
        lines.forEach((line) => show(JSON.parse(line.replace(/^data: /, ""))));
      }
    } catch (error) { show({error: String(error.message || error)}); }
    button.disabled = false;
  });
})();
