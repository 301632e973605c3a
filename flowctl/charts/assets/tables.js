/* Makes each table with `data-name` one that sorts by its heads, is searched, filters by its columns and goes out as
   CSV. A cell says what it is worth as `data-v` where its text is a number with a unit. */
"use strict";
(() => {
  const made = (tag, values, ...inside) => {
    const found = Object.assign(document.createElement(tag), values);
    found.append(...inside);
    return found;
  };
  const worth = cell => cell.dataset.v === undefined ? cell.textContent : Number(cell.dataset.v);
  const empty = cell => cell.dataset.v === undefined && cell.textContent === "-";

  function compared(one, other) { // what is not known comes last, whichever way
    return typeof one === "number" && typeof other === "number" ? one - other
      : String(one).localeCompare(String(other), "en", { numeric: true });
  }

  /* A text that a peer chose must not become a formula of the program that opens the file. */
  function quoted(value) {
    const text = typeof value === "string" && /^[=+\-@\t\r]/.test(value) ? `'${value}` : String(value);
    return /[",;\t\r\n]/.test(text) ? `"${text.replaceAll('"', '""')}"` : text;
  }

  for (const table of document.querySelectorAll("table[data-name]")) {
    const rows = [...table.tBodies[0].rows], heads = [...table.tHead.rows[0].cells];
    if (rows.length < 2) continue;
    const search = made("input", { type: "search", placeholder: "search", ariaLabel: "search this table" });
    const told = made("span", {});
    const choices = new Map(); // column -> its list of values
    const apply = () => {
      const wanted = search.value.toLowerCase();
      let count = 0;
      for (const row of rows) {
        row.hidden = !row.textContent.toLowerCase().includes(wanted)
          || [...choices].some(([column, list]) => list.value && row.cells[column].textContent !== list.value);
        count += !row.hidden;
      }
      told.textContent = count === rows.length ? "" : `${count} of ${rows.length}`;
    };
    heads.forEach((head, column) => {
      const values = [...new Set(rows.map(row => row.cells[column].textContent))].sort();
      if (head.dataset.choose !== undefined && values.length > 1 && values.length <= 50) {
        const list = made("select", { ariaLabel: head.textContent }, made("option", { value: "" }, `${head.textContent}: all`));
        list.append(...values.map(value => made("option", { value }, value.slice(0, 60))));
        list.addEventListener("change", apply);
        choices.set(column, list);
      }
      const button = made("button", { type: "button" }, head.textContent);
      button.addEventListener("click", () => {
        const down = head.ariaSort !== "descending";
        heads.forEach(other => { other.ariaSort = null; });
        head.ariaSort = down ? "descending" : "ascending";
        rows.sort((one, other) => {
          const [left, right] = [one.cells[column], other.cells[column]];
          return empty(left) - empty(right) || compared(worth(left), worth(right)) * (down ? -1 : 1);
        });
        table.tBodies[0].append(...rows);
      });
      head.replaceChildren(button);
    });
    const save = made("button", { type: "button", title: "these rows, as they stand, as a file" }, "CSV");
    save.addEventListener("click", () => {
      const lines = [heads.map(head => quoted(head.dataset.name))];
      for (const row of rows) if (!row.hidden) lines.push([...row.cells].map(cell => empty(cell) ? "" : quoted(worth(cell))));
      const file = new Blob([`${lines.map(line => line.join(",")).join("\r\n")}\r\n`], { type: "text/csv" });
      const link = made("a", { href: URL.createObjectURL(file), download: `${table.dataset.name}.csv` });
      link.click();
      setTimeout(() => URL.revokeObjectURL(link.href), 1e4);
    });
    search.addEventListener("input", apply);
    table.parentElement.before(made("div", { className: "tools" }, search, ...choices.values(), save, told));
  }
})();
