"use strict";

// The page of `attention_page.py`. It computes no attention: it shows what the model
// computed. Where a token comes from is unknown, so it only ever becomes a text node.
//
// A side (encoder, decoder, cross) has stations (layers), a station has heads. A token
// of `queries` looks, one of `keys` is looked at.

const data = JSON.parse(byId("data").textContent);
const state = { lang: data.lang, token: 0, opened: null };
let wanted = { side: 0, layer: 0, head: 0 };
let shown = wanted; // what is wanted once its numbers are unpacked
let numbers; // of the shown head

const side = () => data.sides[shown.side];
const station = () => side().stations[shown.layer];
const words = () => data.words[state.lang];

// --- The document --------------------------------------------------------------------

function byId(id) {
  return document.getElementById(id);
}

function make(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes))
    node.setAttribute(name, value);
  node.append(...children);
  return node;
}

/** A token: whatever characters it has turn nothing around it. */
function named(token) {
  const parts = token.split(/(▁)/).filter(Boolean); // ▁ stands for a space
  const nodes = parts.map((part) => (part === "▁" ? make("i", {}, part) : part));
  return make("bdi", { class: "token" }, ...nodes);
}

/** "{token} looks" -> [the node of the token, " looks"]. */
function phrase(word, values = {}) {
  const known = { d: data.d, root: data.root, few: data.few, ...values };
  const parts = words()[word].split(/\{(\w+)\}/);
  return parts.flatMap((part, i) => (i % 2 ? known[part] : part));
}

function translate() {
  document.documentElement.lang = state.lang;
  for (const node of document.querySelectorAll("[data-word]"))
    node.replaceChildren(...phrase(node.dataset.word));
  for (const node of document.querySelectorAll("[data-label]"))
    node.setAttribute("aria-label", words()[node.dataset.label]);
  for (const button of byId("languages").children)
    button.setAttribute("aria-pressed", button.value === state.lang);
}

// --- Numbers, with Python's digits ---------------------------------------------------

const number = (thousandths) => String(thousandths / 1000);
const share = (thousandths) => (thousandths / 1000).toFixed(3);
const percent = (tenths) => `${(tenths / 10).toFixed(1)} %`;

/** The numbers of one head, which travel as zlib in base64. */
async function unpack(text) {
  const bytes = Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream();
  return new Response(stream.pipeThrough(new DecompressionStream("deflate"))).json();
}

// --- Which attention -----------------------------------------------------------------

function makeChoices() {
  const sides = data.sides.map(({ name }) => [
    make("b", {}, name),
    make("small", { "data-word": name }),
  ]);
  const counted = (list) => list.map((_, i) => [String(i + 1)]);
  fillChoice("side", sides);
  fillChoice("layer", counted(side().stations));
  fillChoice("head", counted(station().heads));
}

function fillChoice(name, labels) {
  const options = labels.map((label, i) => {
    const radio = make("input", { type: "radio", name, value: i });
    radio.checked = wanted[name] === i;
    return make("label", {}, radio, make("span", {}, ...label));
  });
  byId(name).querySelector("div").replaceChildren(...options);
}

/** What is shown stays as it is until the numbers are there; the last choice counts. */
async function choose(choice) {
  const asked = (wanted = { ...wanted, ...choice });
  byId("map").setAttribute("aria-busy", true);
  const { heads } = data.sides[asked.side].stations[asked.layer];
  const found = await unpack(heads[asked.head]);
  if (asked !== wanted) return;
  const before = side().queries;
  shown = asked;
  numbers = found;
  if (side().queries.join() !== before.join()) {
    state.token = 0;
    if (state.opened !== null) state.opened = 0;
  }
  show();
  byId("map").setAttribute("aria-busy", false);
}

function show() {
  showTokens();
  showShares();
  showSteps();
}

// --- Who looks at whom ---------------------------------------------------------------

function showTokens() {
  const queries = side().queries.map((token, i) => {
    const button = make("button", { type: "button", value: i, title: token });
    button.setAttribute("aria-controls", "steps");
    button.append(named(token));
    return make("li", {}, button);
  });
  const keys = side().keys.map((token) => {
    const mask = make("small", {}, words().masked);
    const size = make("span", { class: "percent" });
    return make("li", { title: token }, named(token), mask, size);
  });
  byId("queries").replaceChildren(...queries);
  byId("keys").replaceChildren(...keys);
}

const buttonOf = (token) => byId("queries").children[token].firstChild;

/** The shares of the chosen token: lines, shading and percent. */
function showShares() {
  const { token } = state;
  side().queries.forEach((_, i) => {
    const button = buttonOf(i);
    button.tabIndex = i === token ? 0 : -1;
    button.setAttribute("aria-current", i === token);
    button.setAttribute("aria-expanded", i === state.opened);
  });
  byId("open").hidden = token === state.opened;
  [...byId("keys").children].forEach((item, i) => {
    item.style.setProperty("--share", numbers.shares[token][i] / 1000);
    item.classList.toggle("hidden", isHidden(token, i));
    item.lastChild.textContent = percent(numbers.percents[token][i]);
  });
  drawLines();
  say();
}

const isHidden = (token, key) => numbers.mask !== null && !numbers.mask[token][key];

/** Fine lines for what each token looks at most, strong ones for the chosen token. */
function drawLines() {
  const { token } = state;
  const rows = Math.max(side().queries.length, side().keys.length);
  const fine = numbers.shares.map((row, i) => line(i, row.indexOf(Math.max(...row))));
  const strong = numbers.shares[token].flatMap((thousandths, key) =>
    thousandths < 5 ? [] : [line(token, key, thousandths / 1000)],
  );
  byId("lines").setAttribute("viewBox", `0 0 100 ${rows}`);
  byId("lines").style.setProperty("--rows", rows);
  byId("lines").replaceChildren(...fine, ...strong);
}

function line(query, key, size) {
  const path = document.createElementNS(byId("lines").namespaceURI, "path");
  const [from, to] = [query + 0.5, key + 0.5];
  path.setAttribute("d", `M0 ${from}C45 ${from} 55 ${to} 100 ${to}`);
  path.classList.toggle("strong", size !== undefined);
  if (size !== undefined) path.style.setProperty("--share", size);
  return path;
}

/** In words, for those who hear the page, and for columns longer than the window. */
function say() {
  const token = side().queries[state.token];
  const row = numbers.shares[state.token];
  const best = row.map((_, i) => i).sort((a, b) => row[b] - row[a]);
  const keys = best.slice(0, 3).flatMap((key) => {
    const size = percent(numbers.percents[state.token][key]);
    return [make("span", { class: "pair" }, named(side().keys[key]), ` ${size}`), " "];
  });
  byId("most").replaceChildren(...phrase("most", { token: named(token), keys }));
  const next = phrase("next", { token: named(data.target[state.token]) });
  byId("next").replaceChildren(...(side().name === "encoder" ? [] : next));
}

function point(token) {
  if (token === state.token) return;
  state.token = token;
  showShares();
}

function move(event) {
  const last = side().queries.length - 1;
  const places = {
    ArrowUp: Math.max(state.token - 1, 0),
    ArrowDown: Math.min(state.token + 1, last),
    Home: 0,
    End: last,
  };
  if (!(event.key in places)) return;
  event.preventDefault();
  buttonOf(places[event.key]).focus(); // which points at it
}

// --- The four steps ------------------------------------------------------------------

function openSteps() {
  state.opened = state.token;
  showShares();
  showSteps();
  const narrow = !matchMedia("(min-width: 78rem)").matches;
  if (narrow) byId("steps").scrollIntoView({ block: "start" });
}

function closeSteps() {
  if (state.opened === null) return;
  state.token = state.opened;
  state.opened = null;
  showShares();
  showSteps();
  buttonOf(state.token).focus();
}

function showSteps() {
  const isOpen = state.opened !== null;
  const token = named(side().queries[state.opened ?? 0]);
  const title = isOpen ? phrase("looks", { token }) : phrase("steps");
  const parts = [vectorTable, shareTable, mixedTable, addedTable];
  byId("opened").hidden = byId("close").hidden = !isOpen;
  byId("closed").hidden = isOpen;
  byId("steps-title").replaceChildren(...title);
  byId("opened").replaceChildren(...(isOpen ? parts.map((part) => part()) : []));
}

function vectorTable() {
  const i = state.opened;
  const { query, key, value } = words();
  const asked = [[named(side().queries[i])], [numbers.query[i]]];
  const offered = side().keys.map((token, j) => [
    [named(token)],
    [numbers.key[j]],
    [numbers.value[j]],
  ]);
  return panel(
    phrase("vectors"),
    table("vectors", { query }, [asked]),
    table("vectors", { key, value }, offered),
    remark("few"),
  );
}

function shareTable() {
  const i = state.opened;
  const { scores, masked, hidden, shares } = words();
  const kind = numbers.mask === null ? "shares" : "shares masked";
  const mask = numbers.mask === null ? {} : { mask: masked };
  const rows = side().keys.map((token, j) => [
    [named(side().queries[i]), " → ", named(token)],
    [aligned(number(numbers.scores[i][j]))],
    [aligned(number(numbers.scaled[i][j]))],
    ...(numbers.mask === null ? [] : [[isHidden(i, j) ? hidden : ""]]),
    [bar(i, j)],
  ]);
  const columns = { scores, scaled: phrase("scaled").join(""), ...mask, shares };
  return panel(phrase("steps123"), table(kind, columns, rows));
}

function mixedTable() {
  const i = state.opened;
  const rows = side().keys.map((token, j) => [
    [j === 0 ? "" : "+"],
    [share(numbers.shares[i][j]), " × ", named(token)],
    [numbers.value[j]],
  ]);
  const result = [["="], [], [numbers.output[i]]];
  return panel(
    phrase("mixed"),
    table("mixed", { share: "", value: "" }, [...rows, result]),
  );
}

function addedTable() {
  const rows = Object.entries(station().added).map(([name, vectors]) => [
    [make("code", {}, name)],
    [vectors[state.opened]],
  ]);
  return panel(
    phrase("added", { norm: side().norm }),
    table("added", { vector: "" }, rows),
    remark("joined"),
  );
}

/** A part of the steps, under its name. */
function panel(title, ...content) {
  return make("section", { class: "step" }, make("h3", {}, ...title), ...content);
}

function remark(word) {
  return make("p", { class: "quiet" }, ...phrase(word));
}

/**
 * Rows of cells of nodes under named columns; the first cell of a row is its head.
 * Roles are written out: narrow pages lay rows out as grids, which loses them.
 */
function table(kind, columns, rows) {
  const names = Object.keys(columns);
  const labels = Object.values(columns);
  const bodyRows = rows.map(([first, ...rest]) => {
    const head = make("th", { scope: "row", role: "rowheader" }, ...first);
    const cells = rest.map((content, i) =>
      make("td", { role: "cell", class: names[i] }, ...content),
    );
    return make("tr", { role: "row" }, head, ...cells);
  });
  const node = make("table", { class: kind, role: "table" });
  if (labels.some(Boolean)) {
    const corner = make("td", { role: "cell" });
    const heads = labels.map((label, i) =>
      make("th", { scope: "col", role: "columnheader", class: names[i] }, label),
    );
    const row = make("tr", { role: "row" }, corner, ...heads);
    node.append(make("thead", { role: "rowgroup" }, row));
  }
  node.append(make("tbody", { role: "rowgroup" }, ...bodyRows));
  return node;
}

/** Decimal points stand below each other although 2.5 is not printed as 2.500. */
function aligned(text) {
  const decimals = text.split(".")[1];
  const node = make("span", { class: "number" }, text);
  node.style.marginInlineEnd = `${decimals ? 3 - decimals.length : 4}ch`;
  return node;
}

function bar(token, key) {
  const thousandths = numbers.shares[token][key];
  const text = `${share(thousandths)} = ${percent(numbers.percents[token][key])}`;
  const node = make("span", { class: "bar" }, text);
  node.style.setProperty("--share", thousandths / 1000);
  return node;
}

// --- What happens when ---------------------------------------------------------------

function listen() {
  const queries = byId("queries");
  const tokenAt = ({ target }) => target.closest?.("#queries button");
  let touched; // the token chosen before a finger came down
  const pointAt = (event) => tokenAt(event) && point(Number(tokenAt(event).value));
  // Not pointerover: tokens that scroll past a pointer at rest are not pointed at.
  queries.addEventListener("pointermove", (event) => {
    if (event.pointerType !== "touch") pointAt(event);
  });
  queries.addEventListener("pointerleave", () => point(state.opened ?? state.token));
  queries.addEventListener("pointerdown", () => (touched = state.token));
  queries.addEventListener("focusin", pointAt);
  queries.addEventListener("keydown", move);
  queries.addEventListener("click", (event) => {
    if (!tokenAt(event)) return;
    const before = touched;
    pointAt(event);
    // A finger cannot hover: its first tap shows the shares, the next one opens.
    if (event.pointerType !== "touch" || before === state.token) openSteps();
  });
  byId("open").addEventListener("click", openSteps);
  byId("close").addEventListener("click", closeSteps);
  byId("choices").addEventListener("change", ({ target }) =>
    choose({ [target.name]: Number(target.value) }),
  );
  byId("languages").addEventListener("click", ({ target }) => {
    if (!target.value || !numbers) return;
    state.lang = target.value;
    translate();
    show();
  });
  document.addEventListener("keydown", ({ key }) => key === "Escape" && closeSteps());
}

byId("text").textContent = document.title = data.text;
byId("translation").textContent = data.translation;
makeChoices();
translate();
if (typeof DecompressionStream === "undefined") {
  byId("old").hidden = false;
} else {
  listen();
  choose({});
}
